"""Reads and checks the config of scripts/explore.sh before a process starts: model, prompts, reward, policies' keys.

The diagnosis's own keys are in recipe/common/config/diagnosis.yaml. Keys that a training run has too, such as lengths
and the reward, have the same names as in a training run.
"""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow.parquet as pq
from annotated_types import Ge, Gt, MinLen
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.evaluation.questions.prompts import prompt_ids_of
from verl.trainer.checks.model.settings import check_context, check_cpu_attention, model_json
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.trainer.checks.preflight import check_model_path
from verl.trainer.checks.rows import check_data_files, check_reward_rows
from verl.trainer.checks.settle import settle
from verl.trainer.checks.values import check_kinds
from verl.utils.parts import parts
from verl.workers.config.keys import read_keys
from verl.workers.rollout.run_environment import changes_contexts

KINDS: dict[Any, str] = {
    Annotated[int, Ge(1)]: "prompts",
    Annotated[int, Ge(2)]: "n",
    Annotated[list[Annotated[float, Gt(0)]], MinLen(1)]: "temperatures",
    str: "data.val_files",
}


class Prompt(NamedTuple):
    """A row of the data: its row number, the prompt's token ids, and the fields `about` that the reward reads."""

    number: int
    ids: list[int]
    about: dict[str, Any]


class ExplorationPlan(NamedTuple):
    """A diagnosis whose config and files have been checked."""

    config: DictConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    too_long: int  # number of prompts that were left out because they exceed data.max_prompt_length
    policies: dict[str, DictConfig]  # name of a row of the table -> the config of a run with that policy

    def describe(self) -> list[str]:
        config, function = self.config, self.config.reward.custom_reward_function
        left_out = f", {self.too_long} longer than data.max_prompt_length left out" if self.too_long else ""
        scored_by = (
            f"{function.name} of {function.path}" if function.get("path") else "verl's reward of the data_source"
        )
        return [
            f"model: {_shown(config.actor_rollout_ref.model.path)}",
            f"data: {len(self.prompts)} prompts of {_shown(config.data.val_files)}{left_out}, "
            f"{config.n} responses of at most {config.data.max_response_length} tokens each",
            f"scored by: {scored_by}",
            f"policies: {', '.join(self.policies)}",
        ]


def _shown(path: str) -> str:
    """Return a path without the working directory in front of it."""
    return path.removeprefix(f"{os.getcwd()}{os.sep}")


def exploration_plan(config: DictConfig) -> ExplorationPlan:
    """Read and check everything that can be checked before a process starts."""
    _check_keys(config)
    OmegaConf.set_struct(config, False)
    settle(config)
    rollout = config.actor_rollout_ref.rollout
    config.n = rollout.n  # A user's override may have set rollout.n.
    _scale_trees(config)
    check_model_path("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    model = model_json(config.actor_rollout_ref.model.path)
    check_context(config, model)
    check_cpu_attention(config, model)
    policies = dict(_policies(config))
    check_data_files("data.val_files", config.data.val_files, config.data.prompt_key)
    check_reward_rows(config)
    trust = config.actor_rollout_ref.model.get("trust_remote_code", False)
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path, trust_remote_code=trust)
    rows = pq.read_table(config.data.val_files).to_pylist()
    return ExplorationPlan(config, tokenizer, *_prompts(config, tokenizer, rows), policies)


def _scale_trees(config: DictConfig) -> None:
    """Set each null key that scales a tree to the largest value with which the tree grows at most n trajectories."""
    for tree in parts("tree").values():
        if not tree.scaled_by or tree.alias:
            continue
        section = OmegaConf.select(config, tree.section)
        if section[tree.scaled_by] is None:
            values = OmegaConf.to_container(section)
            sizes = (read_keys(tree.keys, values | {tree.scaled_by: size}, tree.section) for size in (1, 2))
            at_one, at_two = map(tree.trajectories, sizes)
            section[tree.scaled_by] = max(1, 1 + (config.n - at_one) // (at_two - at_one))


def _check_keys(config: DictConfig) -> None:
    check_kinds(config, KINDS)
    if OmegaConf.select(config, "reward.reward_model.enable"):
        raise ValueError("reward.reward_model.enable=true: no reward model is started here; expected false")
    if config.write is not None:
        path = Path(str(config.write)).absolute()
        folder = next(parent for parent in path.parents if parent.exists())
        if path.suffix != ".parquet" or path.is_dir() or path.resolve() == Path(config.data.val_files).resolve():
            raise ValueError(f"write={config.write}: expected a .parquet file, and not the data themselves")
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"write={config.write}: {folder} is no folder that can be written")


def _policies(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Yield the name and config of each row of the table, checked like a training run's config."""
    changes: dict[str, Any] = {f"plain T={t}": {"tree": "plain", "temperature": t} for t in config.temperatures}
    changes |= config.policies
    if config.actor_rollout_ref.rollout.environment != "none":
        changes |= config.tool_policies
    for name, policy_changes in changes.items():
        policy = config.copy()
        for key, value in policy_changes.items():
            OmegaConf.update(policy, f"actor_rollout_ref.rollout.{key}", value)
        try:
            check_typed_sections(policy)
            check_parts(policy)
            if changes_contexts(policy):
                raise ValueError("environment.thinking=dropped and max_context are not diagnosed: leave them out")
        except ValueError as error:
            raise ValueError(f"policy {name}: {error}") from error
        yield name, policy


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence, data: DictConfig, tools: list[dict] | None = None
) -> list[int]:
    """Return the tokens of a prompt's messages, with the chat template's options of the config's section `data`, and
    the tools that it describes."""
    options = OmegaConf.to_container(data.get("apply_chat_template_kwargs") or OmegaConf.create())
    return list(prompt_ids_of(tokenizer, messages, options, tools))


def _prompts(config: DictConfig, tokenizer, rows: Sequence[dict]) -> tuple[list[Prompt], int]:
    """Return `config.prompts` rows, drawn by the seed and sorted by row number, and the number of drawn rows that were
    left out because they are too long."""
    data, chosen, lengths = config.data, [], []
    for number in random.Random(f"{config.seed} prompts").sample(range(len(rows)), len(rows)):
        messages = rows[number][data.prompt_key]
        ids = prompt_ids(tokenizer, messages, data)
        lengths.append(len(ids))
        if len(ids) <= data.max_prompt_length:
            others = {name: value for name, value in rows[number].items() if name != data.prompt_key}
            others |= {"extra_info": rows[number].get("extra_info") or {}, "raw_prompt": messages, "index": number}
            chosen.append(Prompt(number, list(ids), others | {"uid": str(number), "global_steps": 0}))
        if len(chosen) == config.prompts:
            break
    if not chosen:
        raise ValueError(
            f"data.max_prompt_length={data.max_prompt_length}: the {len(rows)} prompts of {data.val_files} have "
            f"{min(lengths)} to {max(lengths)} tokens"
        )
    return sorted(chosen), len(lengths) - len(chosen)
