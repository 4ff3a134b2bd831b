"""Checks the type and range of every value in a run's config, before anything computes with it.

Types come from the dataclasses that upstream and our parts build from the config's sections, and for sections without a
dataclass (`data`, `trainer`) from upstream's defaults. Values that cannot work are listed in `RANGES`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import hydra.utils
from annotated_types import Ge, Gt, Le
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

import verl.trainer
from verl.utils.parts import parts
from verl.workers.config.keys import in_words

SCALARS = (bool, int, float, str)
WHOLE = Annotated[int, Ge(1)]
POSITIVE, NOT_NEGATIVE = Annotated[float, Gt(0)], Annotated[float, Ge(0)]
SHARE, SOME_SHARE = Annotated[float, Ge(0), Le(1)], Annotated[float, Gt(0), Le(1)]
ENGINE = ("actor", "ref", "rollout")
# type with a range -> keys whose other values fail in a worker, or train nothing
RANGES: dict[Any, tuple[str, ...]] = {
    WHOLE: (
        *(f"data.{key}" for key in ("train_batch_size", "gen_batch_size", "val_batch_size")),
        *("data.max_prompt_length", "data.max_response_length", "reward.num_workers"),
        *(f"trainer.{key}" for key in ("total_epochs", "total_training_steps", "nnodes", "n_gpus_per_node")),
        *(f"actor_rollout_ref.actor.ppo_{key}" for key in ("mini_batch_size", "epochs", "max_token_len_per_gpu")),
        *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.val_kwargs.n"),
        *(f"actor_rollout_ref.{role}.log_prob_max_token_len_per_gpu" for role in ("ref", "rollout")),
        *(f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu" for role in ("ref", "rollout")),
        *(f"actor_rollout_ref.{role}.ulysses_sequence_parallel_size" for role in ("actor", "ref")),
        *(f"actor_rollout_ref.rollout.{kind}_parallel_size" for kind in ("tensor_model", "data", "pipeline_model")),
        *(f"actor_rollout_ref.rollout.{key}" for key in ("n", "max_num_seqs", "max_num_batched_tokens")),
        *("actor_rollout_ref.rollout.max_model_len", "actor_rollout_ref.rollout.agent.num_workers"),
    ),
    POSITIVE: (
        *("actor_rollout_ref.rollout.temperature", "actor_rollout_ref.actor.optim.lr", "critic.optim.lr"),
        *("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
        "actor_rollout_ref.actor.clip_ratio_c",
    ),
    NOT_NEGATIVE: (
        *("actor_rollout_ref.rollout.val_kwargs.temperature", "actor_rollout_ref.actor.optim.weight_decay"),
        *(f"actor_rollout_ref.actor.clip_ratio{end}" for end in ("", "_low", "_high")),
        *("actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"),
    ),
    SHARE: ("algorithm.gamma", "algorithm.lam", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"),
    SOME_SHARE: (
        *("actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.val_kwargs.top_p"),
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    ),
    Annotated[int, Ge(-1)]: ("actor_rollout_ref.rollout.top_k", "actor_rollout_ref.rollout.val_kwargs.top_k"),
}
# root keys that verl 0.9.1 moves to `reward` in its trainer fully_async only -> where they stand
LEGACY = {
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model": "reward.reward_model",
}


def check_values(config: DictConfig) -> None:
    """Check types and ranges in a config without interpolations; null is left to the defaults and later checks."""
    sections = (name for name in config if name != "hydra" and OmegaConf.is_dict(config[name]))
    for section in sections:
        for name, value, kind in typed_values(config[section], upstream_defaults().get(section), f"{section}."):
            check_value(name, value, kind)
    for kind, names in RANGES.items():
        for name in names:
            if (value := OmegaConf.select(config, name)) is not None:
                check_value(name, value, kind)


def check_value(name: str, value: Any, kind: Any) -> None:
    """Check one value by a type, which may have a range; the error names key and value."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(in_words(error.errors()[0], NoneType, name)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def typed_values(section: DictConfig, defaults: DictConfig | None, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key from the root, value, type) for the scalars in a section whose type is known.

    Args:
        defaults: upstream's values for the section, from which the types of keys without a dataclass are taken.
        name: path of the section from the config's root, with a dot at its end.
    """
    target = section.get("_target_")
    hints = get_type_hints(hydra.utils.get_class(target)) if target else {}
    for key in section:
        value = None if OmegaConf.is_missing(section, key) else section[key]
        default = OmegaConf.select(defaults, str(key), throw_on_resolution_failure=False) if defaults else None
        if isinstance(value, DictConfig) and not value._is_none():
            yield from typed_values(value, default if OmegaConf.is_dict(default) else None, f"{name}{key}.")
        elif (kind := _scalar(hints.get(key))) and value is not None:
            yield f"{name}{key}", value, kind
        elif not target and type(default) in (bool, int, float):
            yield f"{name}{key}", value, float if type(value) is float and type(default) is int else type(default)


def _scalar(hint: Any) -> Any:
    """Return the scalar type in `T` or `Optional[T]`; None for other types."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [kind for kind in union if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 and kinds[0] in SCALARS else None


@cache
def upstream_defaults() -> DictConfig:
    """Return upstream's composed config, with its interpolations."""
    folders = (Path(folder) / "config" for folder in verl.trainer.__path__)
    return OmegaConf.load(next(file for folder in folders if (file := folder / "_generated_ppo_trainer.yaml").exists()))


# ---- keys without effect ----


def check_root_keys(config: DictConfig) -> None:
    """Refuse keys at the config's root that nothing reads, of a config whose interpolations are not yet resolved."""
    for old, new in LEGACY.items():
        values = OmegaConf.to_container(OmegaConf.create({"": OmegaConf.select(config, old)}))[""]
        if (leaf := _first_set(values)) is not None:
            raise ValueError(f"{old}{leaf} has no effect in this trainer: set {new}{leaf}")
    read = {*upstream_defaults(), "model_engine", "hydra"}
    for kind in ("tree", "sampler", "credit", "loss"):
        for part in parts(kind).values():
            read |= {key.split(".")[0] for key in (*part.values, *part.smallest, getattr(part, "section", ""))}
    text = OmegaConf.to_yaml(config, resolve=False)
    for key in map(str, config):
        if key not in read and "${" + key not in text:
            known = ", ".join(sorted(read - {"", "hydra"}))
            raise ValueError(f"{key} is at the config's root, where nothing reads it; known: {known}")


def _first_set(values: Any) -> str | None:
    """Return the path of the first leaf that is not null, as in `.path`; None if there is none."""
    if not isinstance(values, dict):
        return None if values is None else ""
    leaves = ((key, _first_set(value)) for key, value in values.items())
    return next((f".{key}{leaf}" for key, leaf in leaves if leaf is not None), None)
