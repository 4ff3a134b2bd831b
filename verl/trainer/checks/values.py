"""Checks the type and range of every value in a run's config, before anything computes with it.

Types come from the dataclasses that upstream and our parts build from the config's sections, and for sections without a
dataclass (`data`, `trainer`) from upstream's defaults. Values that cannot work are listed in `RANGES`.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import hydra.utils
from annotated_types import Ge, Gt, Le
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from verl.utils.parts import parts
from verl.workers.config.keys import ACTOR, ROLLOUT, in_words

SCALARS = {bool, int, float, str}
SHORT = {"actor": ACTOR, "rollout": ROLLOUT}
# type with a range -> keys whose other values fail in a worker, or train nothing; null is left to later checks
RANGES: dict[Any, str] = {
    Annotated[int, Ge(1)]: """
        data.train_batch_size data.gen_batch_size data.val_batch_size data.max_prompt_length data.max_response_length
        trainer.total_epochs trainer.total_training_steps trainer.nnodes trainer.n_gpus_per_node reward.num_workers
        actor.ppo_mini_batch_size actor.ppo_epochs actor.ppo_max_token_len_per_gpu actor.ppo_micro_batch_size_per_gpu
        actor.ulysses_sequence_parallel_size rollout.log_prob_max_token_len_per_gpu rollout.tensor_model_parallel_size
        rollout.log_prob_micro_batch_size_per_gpu rollout.data_parallel_size rollout.pipeline_model_parallel_size
        rollout.n rollout.max_num_seqs rollout.max_num_batched_tokens rollout.max_model_len rollout.agent.num_workers
        rollout.val_kwargs.n rollout.multi_turn.max_parallel_calls""",
    Annotated[int, Ge(0), Le(2**32 - 1)]: "data.seed rollout.seed actor.fsdp_config.seed",
    Annotated[int, Ge(-1)]: "rollout.top_k rollout.val_kwargs.top_k",
    Annotated[float, Gt(0)]: """
        rollout.temperature actor.optim.lr actor.grad_clip actor.clip_ratio_c actor.optim.clip_grad critic.optim.lr
        trainer.progress_timeout rollout.group_timeout""",
    Annotated[float, Ge(0)]: """
        actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high actor.kl_loss_coef algorithm.kl_ctrl.kl_coef
        actor.optim.weight_decay rollout.val_kwargs.temperature""",
    Annotated[float, Ge(0), Le(1)]: "algorithm.gamma algorithm.lam actor.optim.lr_warmup_steps_ratio",
    Annotated[float, Gt(0), Le(1)]: "rollout.top_p rollout.val_kwargs.top_p rollout.gpu_memory_utilization",
    Literal["auto", "disable", "resume_path"]: "trainer.resume_mode",
    Literal["cpu", "cuda", "npu"]: "trainer.device",
    Literal[True]: "trainer.use_v1",
    Literal["fixed", "adaptive"]: "algorithm.kl_ctrl.type",
    Literal[tuple(f"{kl}{end}" for kl in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+"))]: (
        "algorithm.kl_penalty actor.kl_loss_type"
    ),
    Literal["left", "middle", "right"]: "rollout.multi_turn.tool_response_truncate_side",
    Literal["token", "sequence"]: "algorithm.rollout_correction.rollout_is",
    Literal["constant", "cosine"]: "actor.optim.lr_scheduler_type",
    list[Literal["model", "optimizer", "extra", "hf_model"]]: "actor.checkpoint.save_contents",
    Literal["fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel"]: "actor.strategy",
    Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]: "actor.fsdp_config.model_dtype",
    Literal["auto", "bfloat16", "float16", "half", "float32", "float"]: "rollout.dtype",
}
# numbers with which upstream computes
NOT_NULL = """
    trainer.total_epochs trainer.nnodes trainer.n_gpus_per_node trainer.save_freq trainer.test_freq data.val_max_samples
    trainer.critic_warmup data.train_batch_size data.max_prompt_length data.max_response_length data.train_max_samples
    data.dataloader_num_workers actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"""
# root keys that verl 0.9.1 moves to `reward` in its trainer fully_async only -> where they stand
LEGACY = {
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model": "reward.reward_model",
}


def check_values(config: DictConfig) -> None:
    """Check types and ranges in a config without interpolations."""
    for name in NOT_NULL.split():
        check_value(name, OmegaConf.select(config, name, default=0), int)
    check_kinds(config, {kind | None: names for kind, names in RANGES.items()})
    for section in (name for name in config if name != "hydra" and OmegaConf.is_dict(config[name])):
        for name, value, kind in typed_values(config[section], upstream_defaults().get(section), f"{section}."):
            check_value(name, value, kind)


def check_kinds(config: DictConfig, kinds: Mapping[Any, str]) -> None:
    """Check the values of keys; `kinds`: a type, perhaps with a range -> the keys, with blanks between them."""
    for kind, names in kinds.items():
        for section, dot, key in (name.partition(".") for name in names.split()):
            name = SHORT.get(section, section) + dot + key
            check_value(name, OmegaConf.select(config, name), kind)


def check_value(name: str, value: Any, kind: Any) -> None:
    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
    try:
        _adapter(kind).validate_json(json.dumps(value))  # in JSON, strict types take a list for a tuple, and no more
    except ValidationError as error:
        raise ValueError(in_words(error.errors()[0], NoneType, name)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def typed_values(section: DictConfig, defaults: DictConfig | None, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key from the root, value, type) for the scalars and lists of scalars in a section whose type is known, by
    its dataclass or else by upstream's defaults; `name` is the section's path with a dot at its end."""
    target = section.get("_target_")
    hints = get_type_hints(hydra.utils.get_class(target)) if target else {}
    for key in section:
        value = None if OmegaConf.is_missing(section, key) else section[key]
        default = OmegaConf.select(defaults, str(key), throw_on_resolution_failure=False) if defaults else None
        if isinstance(value, DictConfig) and not value._is_none():
            yield from typed_values(value, default if OmegaConf.is_dict(default) else None, f"{name}{key}.")
        elif value is None:
            continue
        elif _is_plain(hint := hints.get(key)):
            yield f"{name}{key}", value, hint
        elif not target and type(default) in (bool, int, float):
            yield f"{name}{key}", value, float if type(value) is float and type(default) is int else type(default)


def _is_plain(hint: Any) -> bool:
    """Return whether a type is a scalar, a list or tuple of scalars, or one of these or None."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    names = {name for kind in union for name in (get_args(kind) if get_origin(kind) in (list, tuple) else (kind,))}
    return names <= SCALARS | {NoneType, ...} and names != {NoneType}


@cache
def upstream_defaults() -> DictConfig:
    """Return upstream's composed config, with its interpolations."""
    return OmegaConf.load(str(files("verl.trainer") / "config/_generated_ppo_trainer.yaml"))


# ---- names that upstream looks up in a worker ----


def check_registered(config: DictConfig) -> None:
    """Check the names that upstream looks up in its registries after it has loaded the models."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.trainer.ppo.reward import resolve_reward_manager_cls
    from verl.utils.import_utils import import_external_libs
    from verl.workers.rollout.replica import get_rollout_replica_class

    import_external_libs(config.actor_rollout_ref.model.get("external_lib"))  # they may register losses
    names = {
        "algorithm.adv_estimator": get_adv_estimator_fn,
        f"{ACTOR}.policy_loss.loss_mode": get_policy_loss_fn,
        "reward.reward_manager.name": lambda name: resolve_reward_manager_cls(config),
    }
    if config.actor_rollout_ref.rollout.name != "vllm":  # vLLM's own import needs vLLM on this machine
        names[f"{ROLLOUT}.name"] = get_rollout_replica_class
    for key, find in names.items():
        try:
            find(name := OmegaConf.select(config, key))
        except Exception as error:  # its type varies with the registry
            raise ValueError(f"{key}={name}: {error}") from error


# ---- keys without effect ----


def check_root_keys(config: DictConfig) -> None:
    """Refuse keys at the config's root that nothing reads, of a config whose interpolations are not yet resolved."""
    for old, new in LEGACY.items():
        if (leaf := _first_set(OmegaConf.select(config, old))) is not None:
            raise ValueError(f"{old}{leaf} has no effect in this trainer: set {new}{leaf}")
    read = {*upstream_defaults(), "model_engine", "hydra", "environment"}
    for part in (part for kind in ("tree", "sampler", "credit", "loss") for part in parts(kind).values()):
        read |= {key.split(".")[0] for key in (*part.values, *part.smallest, getattr(part, "section", ""))}
    text = OmegaConf.to_yaml(config, resolve=False)
    for key in map(str, config):
        if key not in read and "${" + key not in text:
            known = ", ".join(sorted(read - {"", "hydra"}))
            raise ValueError(f"{key} is at the config's root, where nothing reads it; known: {known}")


def _first_set(values: Any) -> str | None:
    """Return the path of the first leaf that is not null, as in `.path`; None if there is none."""
    if not isinstance(values, DictConfig):
        return None if values is None else ""
    leaves = ((key, _first_set(value)) for key, value in values.items())
    return next((f".{key}{leaf}" for key, leaf in leaves if leaf is not None), None)
