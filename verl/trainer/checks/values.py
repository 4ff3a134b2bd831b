"""Checks the type and range of every value in a run's config, before anything computes with it.

Types come from the dataclasses that upstream and our parts build from the config's sections, and for sections without a
dataclass (`data`, `trainer`) from upstream's defaults. Values that cannot work are listed in `RANGES`.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import hydra.utils
from annotated_types import Ge, Gt, Le
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

import verl.trainer
from verl.utils.parts import parts
from verl.workers.config.keys import ACTOR, ROLLOUT, in_words, no_such_key

# sections that a worker builds as dataclasses, and where an unknown key therefore fails
BUILT = (f"{ACTOR}.", f"{ROLLOUT}.", "algorithm.")
SCALARS = {bool, int, float, str}
KL = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"]
KL_LOSS = Literal[KL, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full+"]
# type with a range -> keys whose other values fail in a worker, or train nothing
RANGES: dict[Any, tuple[str, ...]] = {
    Annotated[int, Ge(1)]: (
        *(f"data.{key}" for key in ("train_batch_size", "gen_batch_size", "val_batch_size")),
        *("data.max_prompt_length", "data.max_response_length", "reward.num_workers"),
        *(f"trainer.{key}" for key in ("total_epochs", "total_training_steps", "nnodes", "n_gpus_per_node")),
        *(f"{ACTOR}.ppo_{key}" for key in ("mini_batch_size", "epochs", "max_token_len_per_gpu")),
        *(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ulysses_sequence_parallel_size"),
        *(f"{ROLLOUT}.log_prob_{key}_per_gpu" for key in ("max_token_len", "micro_batch_size")),
        *(f"{ROLLOUT}.{kind}_parallel_size" for kind in ("tensor_model", "data", "pipeline_model")),
        *(f"{ROLLOUT}.{key}" for key in ("n", "max_num_seqs", "max_num_batched_tokens", "max_model_len")),
        *(f"{ROLLOUT}.agent.num_workers", f"{ROLLOUT}.val_kwargs.n"),
    ),
    Annotated[float, Gt(0)]: (
        *(f"{ROLLOUT}.temperature", f"{ACTOR}.optim.lr", f"{ACTOR}.grad_clip", f"{ACTOR}.clip_ratio_c"),
        *(f"{ACTOR}.optim.clip_grad", "critic.optim.lr"),
    ),
    Annotated[float, Ge(0)]: (
        *(f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high")),
        *(f"{ACTOR}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef", f"{ACTOR}.optim.weight_decay"),
        f"{ROLLOUT}.val_kwargs.temperature",
    ),
    Annotated[float, Ge(0), Le(1)]: ("algorithm.gamma", "algorithm.lam", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    Annotated[float, Gt(0), Le(1)]: (
        *(f"{ROLLOUT}.top_p", f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.gpu_memory_utilization"),
    ),
    Literal["auto", "disable", "resume_path"]: ("trainer.resume_mode",),
    Literal["cpu", "cuda", "npu"]: ("trainer.device",),
    Literal[True]: ("trainer.use_v1",),
    Literal["fixed", "adaptive"]: ("algorithm.kl_ctrl.type",),
    KL: ("algorithm.kl_penalty",),
    Literal["token", "sequence"]: ("algorithm.rollout_correction.rollout_is",),
    KL_LOSS: (f"{ACTOR}.kl_loss_type",),
    Literal["constant", "cosine"]: (f"{ACTOR}.optim.lr_scheduler_type",),
    list[Literal["model", "optimizer", "extra", "hf_model"]]: (f"{ACTOR}.checkpoint.save_contents",),
    Literal["fsdp", "fsdp2", "megatron", "veomni", "torchtitan", "automodel", "mindspeed"]: (f"{ACTOR}.strategy",),
    Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]: (f"{ACTOR}.fsdp_config.model_dtype",),
    Literal["auto", "bfloat16", "float16", "half", "float32", "float"]: (f"{ROLLOUT}.dtype",),
    Annotated[int, Ge(0)]: ("data.seed", f"{ROLLOUT}.seed"),
    Annotated[int, Ge(-1)]: (f"{ROLLOUT}.top_k", f"{ROLLOUT}.val_kwargs.top_k"),
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
    for kind, names in RANGES.items():
        for name in names:
            if (value := OmegaConf.select(config, name)) is not None:
                check_value(name, value, kind)
    sections = (name for name in config if name != "hydra" and OmegaConf.is_dict(config[name]))
    for section in sections:
        for name, value, kind in typed_values(config[section], upstream_defaults().get(section), f"{section}."):
            check_value(name, value, kind)


def check_value(name: str, value: Any, kind: Any) -> None:
    """Check one value by a type, which may have a range; the error names key and value."""
    value = OmegaConf.to_container(value) if OmegaConf.is_list(value) else value
    try:
        _adapter(kind).validate_json(json.dumps(value))  # in JSON, strict types take a list for a tuple, and no more
    except ValidationError as error:
        raise ValueError(in_words(error.errors()[0], NoneType, name)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def typed_values(section: DictConfig, defaults: DictConfig | None, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key from the root, value, type) for the scalars and lists of scalars in a section whose type is known.

    Args:
        defaults: upstream's values for the section, from which the types of keys without a dataclass are taken.
        name: path of the section from the config's root, with a dot at its end.

    Raises:
        ValueError: a key is no field of a dataclass that a worker builds.
    """
    target = section.get("_target_")
    hints = get_type_hints(hydra.utils.get_class(target)) if target else {}
    for key in section:
        if target and name.startswith(BUILT) and key not in {"_target_", *hints}:
            raise ValueError(no_such_key(name[:-1], key, sorted(hints)))
        value = None if OmegaConf.is_missing(section, key) else section[key]
        default = OmegaConf.select(defaults, str(key), throw_on_resolution_failure=False) if defaults else None
        if isinstance(value, DictConfig) and not value._is_none():
            yield from typed_values(value, default if OmegaConf.is_dict(default) else None, f"{name}{key}.")
        elif (kind := _plain(hints.get(key))) and value is not None:
            yield f"{name}{key}", value, kind
        elif not target and type(default) in (bool, int, float):
            yield f"{name}{key}", value, float if type(value) is float and type(default) is int else type(default)


def _plain(hint: Any) -> Any:
    """Return the hint if it is a scalar, a list or tuple of scalars, or one of these or None; else None."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    names = {name for kind in union for name in (get_args(kind) if get_origin(kind) in (list, tuple) else (kind,))}
    return hint if names <= SCALARS | {NoneType, ...} and names - {NoneType} else None


@cache
def upstream_defaults() -> DictConfig:
    """Return upstream's composed config, with its interpolations."""
    folders = (Path(folder) / "config" for folder in verl.trainer.__path__)
    return OmegaConf.load(next(file for folder in folders if (file := folder / "_generated_ppo_trainer.yaml").exists()))


# ---- names that upstream looks up in a worker ----


def check_registered(config: DictConfig) -> None:
    """Check the names that upstream looks up in its registries, and make the checks that it makes in the TaskRunner."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.trainer.ppo.v1 import get_trainer_cls

    names: dict[str, Callable[[str], Any]] = {
        "algorithm.adv_estimator": get_adv_estimator_fn,
        f"{ACTOR}.policy_loss.loss_mode": get_policy_loss_fn,
        "trainer.v1.trainer_mode": get_trainer_cls,
    }
    if config.reward.reward_manager.source == "register":
        names["reward.reward_manager.name"] = get_reward_manager_cls
    for key, find in names.items():
        try:
            find(OmegaConf.select(config, key))
        except ValueError as error:
            raise ValueError(f"{key}={OmegaConf.select(config, key)}: {error}") from error
    model = {"lora_rank": 0, "lora": {"rank": 0}}  # its check of the rank imports vLLM; `check_lora` makes another
    without_lora = OmegaConf.merge(config, {"actor_rollout_ref": {"model": model}})
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            validate_config(without_lora, need_reference_policy(config), need_critic(config))
    except AssertionError as error:
        raise ValueError(str(error)) from error


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
