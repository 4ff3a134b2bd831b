"""Every tree with every environment, sampler, credit and loss: a real update of a real tiny model, without Ray.

    python tests/composition.py      takes steps with every two parts, and writes the table of docs/composition.md

A combination is refused by the checks that stop a run before Ray starts, or it takes a step: its prompts are rolled out
on `transformers` by what the config names, once for each tree, environment and sampler; rewards differ among the
trajectories of a prompt; estimator and loss are the real ones; the gradient must be finite and not zero.

The parts are those that are registered (verl.utils.parts), with their smallest settings.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from heapq import heapify, heapreplace
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

import verl.trainer
from recipe.common.menu import CONFIG, choices
from recipe.common.tiny_model import CHAT_TEMPLATE, TinyModelConfig, make_model, make_tokenizer
from recipe.hapo.normalized_entropy import EntropyStatistics, compute_entropy_h
from verl.trainer.checks.parts import TYPED_SECTIONS, check_parts, check_typed_section
from verl.trainer.ppo.v1.component import components_of
from verl.trainer.ppo.v1.explore_trainer import compute_fields
from verl.utils.parts import compares, computed_fields, credit_of, load_choices, nested, parts
from verl.utils.token_fields import FIELDS
from verl.workers.rollout.chat.template import make_builder
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.tools.base_tool import BaseTool
from verl.workers.rollout.tree_rollout import TrajectoryOutput, TreeRollout

PAGE = Path(__file__).resolve().parents[1] / "docs/composition.md"
MARK = "<!-- made by python tests/composition.py -->\n"
TREES, ENVIRONMENTS, SAMPLERS, CREDITS, LOSSES = (
    list(choices(part)) for part in ("tree", "environment", "sampler", "credit", "loss")
)
# The gym needs a class of the user, and an agent a program: tests/conformance/trees.py grows every tree in a game of
# the kind.
ENVIRONMENTS = [name for name in ENVIRONMENTS if name not in ("gym", "agent")]
PROMPTS = ("1 2 3 = 6", "4 5 6 = 15")
# one token each, which the model writes often: what ends a turn, a paragraph, and a result
WORDS = ("<search>", "</search>", "\n\n", "<result>", "</result>")
# large sections of a config that no check of parts reads
NOT_OF_PARTS = ("reward_model", "global_profiler", "skip", "ray_kwargs", "transfer_queue")
SMALL = {
    "data": {"max_response_length": 24},
    "actor_rollout_ref": {"rollout": {"n": 6, "tools": {"call_limit": 2}}},
}


class Cell(NamedTuple):
    """A combination."""

    tree: str
    environment: str
    sampler: str
    credit: str
    loss: str


def cells() -> Iterator[Cell]:
    return map(Cell._make, product(TREES, ENVIRONMENTS, SAMPLERS, CREDITS, LOSSES))


def pairs(cell: Cell) -> set[tuple]:
    """Return each two of a combination's parts, with their kinds."""
    return set(combinations(cell._asdict().items(), 2))


def covering_cells() -> list[Cell]:
    """Return combinations that are not refused and that hold every two parts which go together (a covering array)."""
    open_pairs = {cell: pairs(cell) for cell in cells() if refusal(cell) is None}
    missing, chosen = set().union(*open_pairs.values()), []
    # the number of missing pairs that a cell has, negated, or more of them: numbers only get smaller
    heap = [(-len(own), number, cell) for number, (cell, own) in enumerate(open_pairs.items())]
    heapify(heap)
    while missing:
        _, number, cell = heap[0]
        new = -len(open_pairs[cell] & missing), number, cell
        if new > heap[0]:
            heapreplace(heap, new)
            continue
        missing -= open_pairs[cell]
        chosen.append(cell)
    return chosen


class WordCount(BaseTool):
    """<search>: says how many words it was asked."""

    name = trigger_tag = "search"

    async def execute(self, content: str, *, timeout: float) -> str:
        await asyncio.sleep(0)  # a tool that never awaits gets a process of its own, which takes seconds to start
        return str(len(content.split()))


# ---- the config of a combination ----


@cache
def composed(tree: str, environment: str) -> DictConfig:
    """Hydra's config of a tree in an environment, with short responses and small groups."""
    upstream = Path(verl.trainer.__path__[0]) / "config"
    load_choices()
    overrides = [f"hydra.searchpath=[file://{upstream}]", "hardware=cpu", "trainer.experiment_name=composition"]
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose("explore", [*overrides, f"tree={tree}", f"environment={environment}"])
    OmegaConf.set_struct(config, False)
    count = {"class_path": f"{WordCount.__module__}.WordCount"}
    _update(config, SMALL)
    _update(config, OmegaConf.to_container(nested(parts("tree")[tree].smallest)))
    if environment != "none":
        config.actor_rollout_ref.rollout.tools.tool_instances = {"search": count}
    OmegaConf.resolve(config)  # the checks would do it again and again
    for section in NOT_OF_PARTS:  # the config is copied for each combination
        config[section] = {}
    for role in ("actor", "ref", "rollout"):
        config.actor_rollout_ref[role].pop("profiler", None)
    return config


def _update(config: DictConfig, values: dict) -> None:
    """As OmegaConf.merge, in place: that of a whole run's config takes half a second."""
    for key, value in values.items():
        if isinstance(value, dict) and OmegaConf.is_dict(config.get(key)):
            _update(config[key], value)
        else:
            config[key] = value


def _choose(config: DictConfig, part: str, choice: str) -> None:
    """Put the values of a choice, and its smallest settings, into a config."""
    chosen = parts(part)[choice]
    for values in (chosen.values, chosen.smallest):
        _update(config, OmegaConf.to_container(nested(values)))


@cache
def _chosen(tree: str, environment: str, sampler: str, loss: str) -> tuple[DictConfig, str | None]:
    """The config of a combination but for its credit, and why it is refused, if it is."""
    config = composed(tree, environment).copy()
    _choose(config, "sampler", sampler)
    _choose(config, "loss", loss)
    _update(config, SMALL)
    for key in TYPED_SECTIONS:
        section = str(OmegaConf.select(config, key))
        if section not in _typed:  # a section is the same in many combinations, and slow to build
            _typed[section] = _message(check_typed_section, config, key)
        if _typed[section]:
            return config, _typed[section]
    return config, None


_typed: dict[str, str | None] = {}


def _message(check: Callable[..., None], *arguments) -> str | None:
    """Why a check refuses its arguments; None: it does not."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return None


def config_of(cell: Cell) -> DictConfig:
    config, _ = _chosen(cell.tree, cell.environment, cell.sampler, cell.loss)
    _choose(config, "credit", cell.credit)
    return config


@cache
def refusal(cell: Cell) -> str | None:
    """Why a run with these parts ends before Ray starts; None: it does not."""
    _, reason = _chosen(cell.tree, cell.environment, cell.sampler, cell.loss)
    if reason:
        return reason
    return _message(check_parts, config_of(cell))


# ---- rollouts ----


@cache
def model_and_tokenizer():
    """Random weights, a sharp distribution, and words that are written often enough to call tools and to fork."""
    torch.set_num_threads(1)  # so small a model is slower with more
    tokenizer = make_tokenizer(extra_words=WORDS)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHAT_TEMPLATE
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    model = make_model(TinyModelConfig(**sizes, tie_word_embeddings=False, extra_words=WORDS), tokenizer)
    often = tokenizer.convert_tokens_to_ids(["<search>", "</search>", "\n\n"])
    with torch.no_grad():
        model.model.norm.weight.mul_(40)
        model.lm_head.weight[often] *= 2
    return model, tokenizer


class Rollout(NamedTuple):
    """The rows of all prompts, B; tensors are (B, T).

    Args:
        rows: as the rollout sends them.
        index: (B,) each row's prompt.
        fields: what the rollout says of each token, by its name.
        rewards: of the last token; they differ among the rows of a prompt.
        old, entropy: the policy's log-probabilities and entropies, as numbers.
        new: its log-probabilities once more, with a graph.
    """

    rows: list[TrajectoryOutput]
    index: np.ndarray
    mask: torch.Tensor
    fields: dict[str, torch.Tensor]
    rewards: torch.Tensor
    old: torch.Tensor
    entropy: torch.Tensor
    new: torch.Tensor


@cache
def rollout_of(tree: str, environment: str, sampler: str) -> Rollout:
    config, _ = _chosen(tree, environment, sampler, LOSSES[0])
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    if config.actor_rollout_ref.rollout.adaptive_temperature:
        statistics = _statistics(tree, environment, config.actor_rollout_ref.actor.entropy_pivot)
        tempered = {"temperature_tau": config.actor_rollout_ref.rollout.temperature_tau, **statistics._asdict()}
        sampling["extra_args"] = {"adaptive_temperature": tempered}
    groups = asyncio.run(_rollouts(config, sampling))
    rows = [row for group in groups for row in group]
    sent = {name: field.unsent for name, field in FIELDS.items() if field.unsent is not None}
    row_columns = [row.token_fields | {"responses": row.response_ids} for row in rows]
    fields = {
        name: _padded([columns.get(name, [unsent] * len(columns["responses"])) for columns in row_columns], unsent)
        for name, unsent in sent.items()
    }
    mask = _padded([row.response_mask for row in rows], 0).float()
    rewards, ends = torch.zeros(mask.shape), [len(row.response_ids) - 1 for row in rows]
    rewards[range(len(rows)), ends] = torch.tensor([float(i % 2 == 0) for group in groups for i in range(len(group))])
    index = np.repeat(PROMPTS, [len(group) for group in groups])
    new, entropy = log_probs_and_entropies(rows)
    return Rollout(rows, index, mask, fields, rewards, new.detach(), entropy.detach(), new)


def _statistics(tree: str, environment: str, pivot: float) -> EntropyStatistics:
    """Of the step before, which was sampled plainly, as a run's first step is."""
    before = rollout_of(tree, environment, "plain")
    return compute_entropy_h(before.entropy, before.mask.bool(), pivot)[1]


async def _rollouts(config: DictConfig, sampling: dict) -> list[list[TrajectoryOutput]]:
    model, tokenizer = model_and_tokenizer()

    async def initial_tokens(messages, tools=None):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)

    builder = make_builder(tokenizer, "qwen2", {})
    agent_loop = SimpleNamespace(ct_build_initial_tokens=initial_tokens, continuous_token_builder=builder)
    rollout = TreeRollout(config, agent_loop, TransformersEngine(model, tokenizer), tokenizer)

    async def every_trajectory_fails(outputs, prompt):  # so that trees that read rewards fork
        outputs[-1].reward_score = 0.0

    rollout.compute_score = every_trajectory_fails
    n, groups = config.actor_rollout_ref.rollout.n, []
    for i, text in enumerate(PROMPTS):
        prompt = {"raw_prompt": [{"role": "user", "content": text}], "uid": text, "index": i, "global_steps": 1}
        groups.append(await rollout.run(PromptTask.of_row(prompt), n, sampling))
    return groups


def _padded(rows: Sequence[Sequence[float]], fill: float) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def log_probs_and_entropies(rows: Sequence[TrajectoryOutput]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) of the responses' tokens under the model."""
    model, _ = model_and_tokenizer()
    ids = _padded([[*row.prompt_ids, *row.response_ids] for row in rows], 0)
    log_probs = model(ids).logits.log_softmax(-1)[:, :-1]  # padding is on the right, where causal models do not look
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    chosen = log_probs.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    spans = [(len(row.prompt_ids) - 1, len(row.prompt_ids) + len(row.response_ids) - 1) for row in rows]
    return tuple(
        pad_sequence([values[i, begin:end] for i, (begin, end) in enumerate(spans)], batch_first=True)
        for values in (chosen, entropies)
    )


# ---- a step ----


def gradient(cell: Cell) -> torch.Tensor:
    """Of the loss by all parameters, flat, for a combination that is not refused."""
    config, rollout = config_of(cell), rollout_of(cell.tree, cell.environment, cell.sampler)
    components, needed = components_of(config), computed_fields(config)
    fields = compute_fields(needed, components, rollout.entropy, rollout.mask.bool(), {})
    with ExitStack() as stack:
        for name, values in {**rollout.fields, **fields}.items():
            stack.enter_context(FIELDS[name].bound(values))
        for component in components:
            for context_value, value in component.context_values().items():
                stack.enter_context(context_value.bound(value))
        for field in credit_of(cell.credit).reward_fields:
            stack.enter_context(field.bound(rollout.rewards.sum(-1).double()))
        estimator = get_adv_estimator_fn(config.algorithm.adv_estimator)
        advantages, _ = estimator(rollout.rewards, rollout.mask, index=rollout.index, config=config.algorithm)
    compared = compares(config.algorithm.adv_estimator)
    if compared is not None and compared.by_group:  # as the trainer does
        _, number, size = np.unique(rollout.index, return_inverse=True, return_counts=True)
        advantages = advantages * torch.from_numpy(size[number] > 1).unsqueeze(-1)
    actor = _actor(cell.tree, cell.environment, cell.sampler, cell.loss)
    with ExitStack() as stack:
        for name, values in fields.items():
            stack.enter_context(FIELDS[name].bound(values))
        loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
            rollout.old, rollout.new, advantages, rollout.mask, actor.loss_agg_mode, actor
        )
    parameters = list(model_and_tokenizer()[0].parameters())
    parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return torch.cat([part.flatten() for part in parts if part is not None])


@cache
def _actor(tree: str, environment: str, sampler: str, loss: str):
    return omega_conf_to_dataclass(_chosen(tree, environment, sampler, loss)[0].actor_rollout_ref.actor)


def take_step(cell: Cell) -> None:
    """
    Raises:
        ArithmeticError: the gradient is not finite, or zero everywhere: nothing is learnt.
    """
    largest = gradient(cell).abs().max()
    if not 1e-6 < largest < torch.inf:
        raise ArithmeticError(f"{' '.join(map('='.join, cell._asdict().items()))}: the largest gradient is {largest}")


# ---- the page ----


def table() -> str:
    """Return the parts that all go together, then a table of those that do not, and why a combination is refused."""
    reasons: dict[str, int] = {}
    free, lines = [], ["| tree | environment | credit | which samplers and losses |", "|---|---|---|---|"]
    for tree, environment in product(TREES, ENVIRONMENTS):
        of_entry: dict[str, list[str]] = {}
        for credit in CREDITS:
            of_entry.setdefault(_entry(tree, environment, credit, reasons), []).append(credit)
        if list(of_entry) == ["yes"]:
            free.append(f"{tree} with {environment}")
            continue
        for entry, credits in of_entry.items():
            names = "all" if credits == CREDITS else ", ".join(credits)
            lines.append(f"| {tree} | {environment} | {names} | {entry} |")
    groups = {"trees and environments": free, "credits": CREDITS, "samplers": SAMPLERS, "losses": LOSSES}
    together = [f"- {group}: {', '.join(names)}" for group, names in groups.items()]
    refused = [f"{number}. {reason}" for reason, number in reasons.items()] or ["No combination is refused."]
    return "\n".join(["All of these go together:", "", *together, "", *lines, "", *refused]) + "\n"


def _entry(tree: str, environment: str, credit: str, reasons: dict[str, int]) -> str:
    """`yes`, or for which samplers and losses not, with the number of the reason."""
    refused: dict[str, list[tuple[str, str]]] = {}
    for sampler, loss in product(SAMPLERS, LOSSES):
        if reason := refusal(Cell(tree, environment, sampler, credit, loss)):
            refused.setdefault(reason, []).append((sampler, loss))
    notes = [f"not {_shortly(where)} ({reasons.setdefault(why, len(reasons) + 1)})" for why, where in refused.items()]
    return "; ".join(notes) or "yes"


def _shortly(where: list[tuple[str, str]]) -> str:
    samplers, losses = ({pair[i] for pair in where} for i in (0, 1))
    if len(where) < len(samplers) * len(losses):
        return ", ".join(map(" ".join, where))
    names = [sorted(part) for part, whole in ((samplers, SAMPLERS), (losses, LOSSES)) if len(part) < len(whole)]
    return " with ".join(", ".join(part) for part in names) or "at all"


def main() -> None:
    taken = covering_cells()
    for cell in taken:
        take_step(cell)
    head, mark, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(head + mark + table())
    print(f"{len(taken)} combinations took a step, which hold every two parts that go together: {PAGE}")


if __name__ == "__main__":
    main()
