"""Checks that a run's parts and settings fit its schedule and each other; each raises a ValueError."""

import importlib.util
import math

from omegaconf import DictConfig, OmegaConf

from verl.utils.parts import computed_fields
from verl.workers.config.explore import parts_of
from verl.workers.config.schedule import (
    ASYNCHRONOUS,
    CPU_BACKEND,
    ENGINE,
    gpus_of_server,
    rollout_workers,
    schedule_of,
)


def check_schedule(config: DictConfig) -> None:
    """Check that the run's parts and settings fit its schedule and each other."""
    _check_entropies(config)
    _check_correction(config)
    schedule = schedule_of(config)
    if schedule in ASYNCHRONOUS:
        _check_asynchronous(config, schedule)
    if schedule == "separate_async":
        _check_separate(config)


def check_transport(config: DictConfig, cuda_is_here: bool) -> None:
    """Check that cupy is installed if separate servers get their weights by the backend `nccl`, which needs it."""
    nccl = rollout_workers(config) and config.actor_rollout_ref.rollout.checkpoint_engine.backend == "nccl"
    if nccl and cuda_is_here and importlib.util.find_spec("cupy") is None:
        raise ValueError(
            f"{ENGINE}.backend=nccl with schedule=separate_async, and the package cupy is not installed, with which "
            "upstream sends weights: pip install cupy-cuda13x==14.0.1, or that of your CUDA; or choose another backend"
        )


def _check_entropies(config: DictConfig) -> None:
    key = "algorithm.rollout_correction.bypass_mode"
    if OmegaConf.select(config, key) and (needs := computed_fields(config)):
        raise ValueError(
            f"{key}=true skips the pass that computes the entropies, which {next(iter(needs.values()))} needs"
        )


def _check_correction(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    tree = parts_of(rollout).tree
    for name in ("rollout_is", "rollout_rs", "bypass_mode"):
        key = f"algorithm.rollout_correction.{name}"
        if not (value := OmegaConf.select(config, key)):
            continue
        if name != "bypass_mode" and tree is None and not rollout.calculate_log_probs:  # trees' rows always have them
            raise ValueError(
                f"{key}={value} needs actor_rollout_ref.rollout.calculate_log_probs=true: without the rollout's "
                "probabilities upstream corrects nothing and does not say so"
            )
        truncated = {"top_p": (1, rollout.top_p != 1), "top_k": (-1, rollout.top_k > 0)}
        for sampling, (whole, is_truncated) in truncated.items():
            if is_truncated and rollout.get("logprobs_mode", "processed_logprobs") == "processed_logprobs":
                raise ValueError(
                    f"{key}={value} with actor_rollout_ref.rollout.{sampling}={rollout[sampling]}: the rollout's "
                    "probabilities are those of the truncated distribution, and would be compared with the trainer's "
                    f"whole one: set {sampling} to {whole}, or {key} to null"
                )


def _check_asynchronous(config: DictConfig, schedule: str) -> None:
    _check_bounds(config, schedule)
    if (seconds := OmegaConf.select(config, "actor_rollout_ref.rollout.group_timeout")) is not None:
        raise ValueError(
            f"actor_rollout_ref.rollout.group_timeout={seconds} with schedule={schedule}: a prompt also waits while "
            "the policy is updated, so that no limit of its own fits: set it to null; trainer.progress_timeout ends a "
            "run that hangs"
        )
    if not config.actor_rollout_ref.get("hybrid_engine", True):
        raise ValueError(
            f"actor_rollout_ref.hybrid_engine=false with schedule={schedule}: the trainer's GPUs hold servers, too; "
            "verl 0.9.1 does not read the key (colocate_async) or fails when it logs it (separate_async): set it to "
            "true"
        )
    filters = OmegaConf.select(config, "algorithm.filter_groups")
    if filters and filters.get("enable") and (bound := filters.get("max_num_gen_batches")):
        raise ValueError(
            f"algorithm.filter_groups.max_num_gen_batches={bound} with schedule={schedule}: prompts of later batches "
            "replace dropped groups, so that nobody can count a batch's own: set it to 0, or choose schedule=sync"
        )


def _check_bounds(config: DictConfig, schedule: str) -> None:
    """Check that prompts do not get too old while they wait; upstream's buffer checks the bounds themselves."""
    sampler, ahead = config.trainer.v1.sampler, config.trainer.v1[schedule].num_warmup_batches
    bound, strategy = sampler.max_off_policy_threshold, sampler.max_off_policy_strategy
    if type(ahead) not in (int, float) or ahead < 0:
        raise ValueError(f"trainer.v1.{schedule}.num_warmup_batches={ahead}: expected a number from 0")
    if OmegaConf.select(sampler, "custom_sampler.path"):  # a user's sampler may use the bound in its own way
        return
    if bound and strategy == "drop" and math.ceil(ahead) >= bound:
        raise ValueError(
            f"trainer.v1.{schedule}.num_warmup_batches={ahead} with trainer.v1.sampler.max_off_policy_threshold="
            f"{bound}: a prompt that waits its turn for as many steps as there are batches ahead would be dropped as "
            "too old: choose fewer batches ahead, or a greater threshold"
        )


def _check_separate(config: DictConfig) -> None:
    """Check what upstream's trainer does not assert at its start."""
    part = config.actor_rollout_ref
    replica = gpus_of_server(part.rollout)
    if rollout_workers(config) % replica:
        raise ValueError(
            f"actor_rollout_ref.rollout.nnodes x n_gpus_per_node = {rollout_workers(config)} with "
            f"schedule=separate_async: expected a multiple of the {replica} GPUs of a server "
            "(tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size)"
        )
    backend = part.rollout.checkpoint_engine.backend
    if (backend == CPU_BACKEND) != (config.trainer.device == "cpu"):
        raise ValueError(
            f"{ENGINE}.backend={backend} with schedule=separate_async and trainer.device={config.trainer.device}: "
            f"weights travel between processes; expected {CPU_BACKEND} on CPUs, nccl or another of upstream's on GPUs, "
            "null for the usual one"
        )
