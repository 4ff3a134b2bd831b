"""Explains a composition of parts on one small prompt: its tree, and what a training step does with each token.

    python -m recipe.common.explain tree=treepo credit=treepo loss=archer
    python -m recipe.common.explain recipe=latr --html outputs/explain

The real parts grow a tree, give credit and compute the loss. A toy stands for the model: its distributions are drawn
with the tokens before them as the seed. A response with an even number of vowels is right. Each line is a segment:

    through    number of trajectories through the segment, and value, the share of them that are right
    advantage  mean over these trajectories and the segment's tokens
    weight     how much the step raises the log-probability of each token: the derivative of -loss, summed over the
               trajectories through it, in thousandths; one number if all tokens have the same

Any override of a run's config works (python -m recipe.common.menu).
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

import verl.trainer
from recipe.common.menu import CONFIG, RECIPES
from recipe.common.tiny_model import make_tokenizer
from verl.trainer.checks.parts import check_parts, check_typed_sections, run_parts
from verl.trainer.ppo.v1.component import Component, components_of
from verl.trainer.ppo.v1.explore_trainer import compute_fields
from verl.trainer.ppo.v1.tree_reports import tree_record
from verl.utils.atomic_files import replacing
from verl.utils.parts import GROUP_COMPARISONS, compares, computed_fields, credit_of, load_choices
from verl.utils.token_fields import FIELDS
from verl.workers.rollout.chat.template import make_builder
from verl.workers.rollout.engines.local_transformers import ToyModel, TransformersEngine
from verl.workers.rollout.prompt_task import STEP_SETTINGS, PromptSettings, PromptTask
from verl.workers.rollout.tools.base_tool import BaseTool
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS, TREE, TrajectoryTree
from verl.workers.rollout.tree_rollout import TrajectoryOutput, TreeRollout

ROOT = Path(__file__).parents[2]
# The toy writes letters, the end of a step and, with tools, calls. Each is one token.
LETTERS, END_OF_STEP, CALL = "abcdefgh", "\n\n", "<search>a b</search>"
WORDS = (CALL, "<result>", "</result>", END_OF_STEP)
PROMPT = "which letters?"
SMALL = (
    "data.max_prompt_length=256",
    "data.max_response_length=32",
    "actor_rollout_ref.rollout.n=6",
    "trainer.tree_freq=1",
)


class WordCount(BaseTool):
    """<search>: says how many words it was asked."""

    name = trigger_tag = "search"

    async def execute(self, content: str, *, timeout: float) -> str:
        return str(len(content.split()))


# ---- one training step, as code ----


@dataclass
class Batch:
    """The rows of the prompts' trees, B; T is the longest response.

    Attributes:
        rows: the rollout's rows, as the trainer gets them.
        index: (B,) each row's prompt.
        mask: (B, T) 1 for the model's tokens.
        fields: the tree's values for each token, by the field's name; each (B, T).
        rewards: (B, T) the reward at a row's last token.
        old, entropy: (B, T) log-probability of each token under the policy that wrote it, and entropy in nats.
    """

    rows: list[TrajectoryOutput]
    index: np.ndarray
    mask: torch.Tensor
    fields: dict[str, torch.Tensor]
    rewards: torch.Tensor
    old: torch.Tensor
    entropy: torch.Tensor


def training_step(
    config: DictConfig, components: Sequence[Component], batch: Batch, drift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages (B, T) and the derivative (B, T) of the loss by the tokens' log-probabilities.

    In a step's first mini-batch the new policy still is the old one. `drift` makes it another one, as after some
    updates: the standard deviation of the log-probabilities' change, which is drawn.
    """
    fields = compute_fields(computed_fields(config), components, batch.entropy, batch.mask.bool(), {})
    with ExitStack() as bound:
        for name, values in {**batch.fields, **fields}.items():
            bound.enter_context(FIELDS[name].bound(values))
        for component in components:
            for context_value, value in component.context_values().items():
                bound.enter_context(context_value.bound(value))
        for reward_field in credit_of(config.algorithm.adv_estimator).reward_fields:
            bound.enter_context(reward_field.bound(batch.rewards.sum(-1).double()))
        estimator = get_adv_estimator_fn(config.algorithm.adv_estimator)
        advantages, _ = estimator(batch.rewards, batch.mask, index=batch.index, config=config.algorithm)
    if compares(config.algorithm.adv_estimator) in GROUP_COMPARISONS:  # alone in its group it is compared with none
        _, prompt, size = np.unique(batch.index, return_inverse=True, return_counts=True)
        advantages = advantages * torch.from_numpy(size[prompt] > 1).unsqueeze(-1)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    policy_loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
    change = torch.randn(batch.old.shape, generator=torch.Generator().manual_seed(0))
    new = (batch.old + drift * change).requires_grad_()
    with ExitStack() as bound:
        for name, values in fields.items():
            bound.enter_context(FIELDS[name].bound(values))
        loss, _ = policy_loss(batch.old, new, advantages, batch.mask, actor.loss_agg_mode, actor)
    (gradient,) = torch.autograd.grad(loss, new)
    return advantages, gradient


def roll_out(
    config: DictConfig,
    components: Sequence[Component],
    prompts: Sequence[str],
    model: ToyModel,
    tokenizer,
    reward: Callable[[str], float],
    step: int = 1,
) -> Batch:
    """Return the rows of trees that the config's parts grow from the prompts; `reward` scores a response's text."""

    async def grow() -> list[list[TrajectoryOutput]]:
        async def initial_tokens(messages, tools=None):
            return tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )

        async def score(outputs, row) -> None:
            outputs[-1].reward_score = reward(tokenizer.decode(outputs[-1].response_ids, skip_special_tokens=True))

        builder = make_builder(tokenizer, "qwen2", {})
        agent_loop = SimpleNamespace(ct_build_initial_tokens=initial_tokens, continuous_token_builder=builder)
        rollout = TreeRollout(config, agent_loop, TransformersEngine(model, tokenizer), tokenizer)
        rollout.compute_score = score
        keys, settings, groups = config.actor_rollout_ref.rollout, PromptSettings(), []
        trainer = SimpleNamespace(global_steps=step, total_training_steps=100, set_temperature=lambda value: None)
        for component in components:
            settings = settings.merged(component.step_settings(trainer))
        sampling = {"temperature": keys.temperature, "top_p": keys.top_p, "top_k": keys.top_k}
        sampling |= {"extra_args": settings.sampler} if settings.sampler else {}
        for i, text in enumerate(prompts):
            row = {"raw_prompt": [{"role": "user", "content": text}], "uid": text, "index": i, "global_steps": step}
            task = PromptTask.of_row(row | {STEP_SETTINGS: settings})
            rows = await rollout.run(task, keys.n, sampling)
            for output in rows:
                if output.reward_score is None:
                    await score([output], row)
            groups.append(rows)
        await rollout.environment.stop()
        return groups

    groups = asyncio.run(grow())
    rows = [row for group in groups for row in group]
    fields = {}
    for name, field in FIELDS.items():
        if field.unsent is not None:
            sent = [row.token_fields.get(name, [field.unsent] * len(row.response_ids)) for row in rows]
            fields[name] = padded(sent, field.unsent)
    mask = padded([row.response_mask for row in rows], 0).float()
    rewards = torch.zeros(mask.shape)
    rewards[range(len(rows)), [len(row.response_ids) - 1 for row in rows]] = torch.tensor(
        [float(row.reward_score) for row in rows]
    )
    old, entropy = zip(*(_log_probs_and_entropies(model, row) for row in rows), strict=True)
    index = np.repeat(prompts, [len(group) for group in groups])
    return Batch(rows, index, mask, fields, rewards, padded(old, 0), padded(entropy, 0))


def _log_probs_and_entropies(model: ToyModel, row: TrajectoryOutput) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    log_probs = model(ids[:, :-1], logits_to_keep=len(row.response_ids)).logits[0].log_softmax(-1)
    chosen = log_probs.gather(-1, torch.tensor(row.response_ids).unsqueeze(-1)).squeeze(-1)
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def padded(rows: Sequence[Sequence[float]], fill: float) -> torch.Tensor:
    """Return rows of different lengths as one tensor (B, T)."""
    return pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=fill)


# ---- the command ----


def explained_config(overrides: Sequence[str]) -> DictConfig:
    """Return a run's config with these overrides; what they leave open is small."""

    def composed(more: Sequence[str]) -> DictConfig:
        with initialize_config_dir(str(CONFIG), version_base=None):
            return compose("explore", [*fixed, *more, *overrides])

    load_choices()
    folders = [Path(verl.trainer.__path__[0], "config"), *sorted(RECIPES.glob("*/config"))]
    searched = ",".join(f"file://{folder}" for folder in folders)
    fixed = [f"hydra.searchpath=[{searched}]", "hardware=cpu", "trainer.experiment_name=explain", *SMALL]
    small = {key: value for part in run_parts(composed([])) for key, value in getattr(part, "smallest", {}).items()}
    config = composed([f"++{key}={json.dumps(value)}" for key, value in small.items()])
    OmegaConf.set_struct(config, False)
    if config.get("environment") and not any("tool_instances" in override for override in overrides):
        tool = {"class_path": f"{WordCount.__module__}.WordCount"}
        config.actor_rollout_ref.rollout.tools.tool_instances = {"search": tool}
    check_typed_sections(config)
    check_parts(config)
    return config


def toy(calls: bool, seed: int = 0) -> tuple[ToyModel, Any]:
    """Return the model, which also writes calls of a tool if `calls`, and its tokenizer."""
    tokenizer = make_tokenizer(extra_words=WORDS)
    weights = dict.fromkeys(LETTERS, 1.0) | {END_OF_STEP: 1.0, tokenizer.eos_token: 0.5}
    weights |= {CALL: 3.0} if calls else {}
    ids = tokenizer.convert_tokens_to_ids(list(weights))
    return ToyModel(dict(zip(ids, weights.values(), strict=True)), len(tokenizer), seed), tokenizer


def is_right(response: str) -> float:
    """Return 1 for a response with an even number of vowels, else 0."""
    return float(sum(map(response.count, "ae")) % 2 == 0)


def explain(config: DictConfig, seed: int = 0, drift: float = 0.0) -> tuple[str, dict]:
    """Return what the command prints, and the tree's record for scripts/view_trees.py."""
    model, tokenizer = toy(bool(config.get("environment")), seed)
    components = components_of(config)
    # a tempered sampler begins in the second step
    for step in range(1, 3 if config.actor_rollout_ref.rollout.get("adaptive_temperature") else 2):
        batch = roll_out(config, components, [PROMPT], model, tokenizer, is_right, step)
        advantages, gradient = training_step(config, components, batch, drift)
    tree = TrajectoryTree.from_json(batch.rows[0].extra_fields[TREE])
    segment_ids, right = batch.fields[SEGMENT_IDS.name], batch.rewards.sum(-1)
    lines = [f"prompt: {PROMPT}", "", f"{'segment':<50} through  value  advantage  weight"]

    def describe(number: int, indent: str) -> None:
        segment = tree.segments[number]
        at = segment_ids == number
        through = at.any(-1)
        name = indent + repr(tokenizer.decode(segment.token_ids))[1:-1]
        name = name if len(name) <= 50 else f"{name[:49]}…"
        if not through.any():
            lines.append(f"{name:<50} dropped")
        elif segment.author != "model":
            lines.append(f"{name:<50} {int(through.sum()):>7}         (the environment's)")
        else:
            places = at.cumsum(-1) - 1  # place of each token within the segment
            weights = [-1000 * gradient[at & (places == i)].sum() for i in range(len(segment.token_ids))]
            shown = [f"{weight:+.1f}" for weight in weights]
            shown = shown[:1] if len(set(shown)) == 1 else shown
            value, advantage = right[through].mean(), advantages[at].mean()
            segment.info.notes |= {"value": float(value), "advantage": float(advantage), "weight": " ".join(shown)}
            lines.append(f"{name:<50} {int(through.sum()):>7} {value:6.2f} {advantage:+10.3f}  {' '.join(shown)}")
        for child, other in enumerate(tree.segments):
            if other.parent == number:
                describe(child, indent + "  ")

    for number, segment in enumerate(tree.segments):
        if segment.parent is None:
            describe(number, "")
    rewards = " ".join(
        "none" if tree.is_dropped(leaf) else f"{reward:g}" for leaf, reward in zip(tree.leaves, right, strict=True)
    )
    lines += ["", f"rewards of the trajectories: {rewards}"]
    return "\n".join(lines), tree_record(tree, 1, PROMPT, right.tolist(), "rows", tokenizer)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, such as tree=latr credit=tree_gain")
    parser.add_argument("--html", type=Path, metavar="FOLDER", help="write the tree there, and a page that shows it")
    parser.add_argument("--drift", type=float, default=0.0, help="of the new policy's log-probabilities, such as 0.3")
    parser.add_argument("--seed", type=int, default=0, help="another one gives another toy, and so another tree")
    options = parser.parse_intermixed_args(arguments)
    try:
        text, record = explain(explained_config(options.overrides), options.seed, options.drift)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")
    print(text)
    if options.html is not None:
        file = options.html / "trees/step_000001.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished:
            unfinished.write_text(json.dumps(record) + "\n")
        subprocess.run([sys.executable, ROOT / "scripts/view_trees.py", options.html], check=True)


if __name__ == "__main__":
    main()
