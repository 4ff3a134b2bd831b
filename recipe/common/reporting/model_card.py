"""Describes an exported checkpoint: the model card and the training config that lie beside its weights."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData
from omegaconf import DictConfig, OmegaConf

from recipe.common.reporting.comparison import Results, markdown
from verl.workers.config.explore import parts_of
from verl.workers.config.sampler_choice import describe_sampler
from verl.workers.config.schedule import schedule_of

CONFIG_FILE = "training_config.yaml"
CARD_FILE = "README.md"
SECRET = re.compile(r"(api_?key|secret|password|credential|authorization|_token)$", re.IGNORECASE)
# Sections that concern the machines of a run, or services with keys.
NOT_SHARED = ("ray_kwargs", "actor_rollout_ref.rollout.tools")


class CheckpointFacts(NamedTuple):
    """Facts about an exported checkpoint, for its model card."""

    run: str
    step: int
    config: DictConfig | None  # None for a checkpoint without one
    dtype: str  # data type of the weights
    lora: dict[str, Any] | None  # `r`, `lora_alpha` and `use_rslora` of what was merged; None without LoRA
    results: Results  # of the checkpoint's step; the experiment is the way to measure


def shared_config(config: DictConfig) -> DictConfig:
    """Return a copy of a run's config without secrets and the sections about machines and services (`NOT_SHARED`).

    A value counts as a secret if the name of its key ends as in `SECRET`, such as `api_key` or `password`; a secret
    under another name, or within a text, is kept.
    """

    def without_secrets(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: without_secrets(value) for key, value in node.items() if not SECRET.search(str(key))}
        return [without_secrets(value) for value in node] if isinstance(node, list) else node

    copy = OmegaConf.create(without_secrets(OmegaConf.to_container(config)))
    for key in NOT_SHARED:
        section, _, name = key.rpartition(".")
        (OmegaConf.select(copy, section) if section else copy).pop(name, None)
    return copy


def model_card(facts: CheckpointFacts) -> str:
    """Return the model card as Markdown with Hugging Face's YAML header."""
    config = facts.config
    base = None if config is None else str(config.actor_rollout_ref.model.path)
    is_hub_name = base is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists()
    header = ModelCardData(
        base_model=base if is_hub_name else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "verl"],
    )
    lines = ["---", header.to_yaml(), "---", "", f"# {facts.run}, step {facts.step}", ""]
    lines += [
        "A language model that was trained by reinforcement learning with verifiable rewards, with verl and the",
        f"exploration recipes for it. The weights are in {facts.dtype}.",
        "",
    ]
    if config is None:
        lines += ["The checkpoint holds no config.yaml, so that its method and data are not known.", ""]
    else:
        lines += [*_table(_training(facts, config)), "", f"The whole config is in {CONFIG_FILE}.", ""]
    lines += ["# Measurements at this step", ""]
    lines += [markdown(facts.results) if facts.results else "The run's folder has none.", ""]
    return "\n".join(lines)


def _table(rows: dict[str, Any]) -> Iterator[str]:
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {' '.join(str(value).split())} |" for name, value in rows.items())


def _training(facts: CheckpointFacts, config: DictConfig) -> dict[str, Any]:
    data, trainer, model = config.data, config.trainer, config.actor_rollout_ref.model
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    tree, environment = parts_of(rollout)
    files = [data.train_files] if isinstance(data.train_files, str) else data.train_files
    lora = ", ".join(f"{key} {value}" for key, value in (facts.lora or {}).items())
    return {
        "base model": model.path,
        **({"LoRA": f"{lora}; merged into the weights"} if lora else {}),
        "tree": tree or "independent responses",
        "environment": environment,
        "sampler": describe_sampler(config),
        "credit": f"algorithm.adv_estimator={config.algorithm.adv_estimator}",
        "loss": f"actor.policy_loss.loss_mode={actor.policy_loss.loss_mode}",
        "schedule": schedule_of(config),
        "training data": ", ".join("/".join(Path(file).parts[-2:]) for file in files),
        "one step": f"{data.train_batch_size} prompts x {rollout.n} responses of at most "
        f"{data.max_response_length} tokens, mini-batches of {actor.ppo_mini_batch_size} prompts",
        "learning rate": actor.optim.lr,
        "seed": f"data {data.seed}, rollout {rollout.seed}, trainer {actor.fsdp_config.seed}",
        "workers": f"{trainer.nnodes} x {trainer.n_gpus_per_node} {trainer.device}, {actor.strategy}",
    }
