"""Checks that each part of a run finds its own keys, and that the parts fit each other and the run's schedule."""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from verl.trainer.checks.rows import data_files
from verl.utils.data_files import read_rows
from verl.utils.parts import computed_fields, credit_of, parts, tree_part
from verl.workers.config.explore import parts_of
from verl.workers.config.keys import ACTOR, ROLLOUT, no_such_key
from verl.workers.config.schedule import (
    ASYNCHRONOUS,
    CPU_BACKEND,
    ENGINE,
    EXPLORE_TRAINERS,
    filters_groups,
    gpus_of_server,
    rollout_workers,
    schedule_of,
)

TYPED_SECTIONS = (ACTOR, ROLLOUT, "algorithm")


def check_typed_section(config: DictConfig, key: str) -> None:
    """Check a section by building upstream's typed config here, since a wrong key would otherwise fail in a worker."""
    from verl.utils.config import omega_conf_to_dataclass

    section = OmegaConf.select(config, key)
    check_names(section, key)
    try:
        omega_conf_to_dataclass(section)
    except Exception as error:
        root_cause = error.__cause__ or error
        raise ValueError(f"{key}: {(str(root_cause) or repr(root_cause)).splitlines()[0]}") from error


def check_typed_sections(config: DictConfig) -> None:
    """See `check_typed_section`; also checks the keys of contexts that change."""
    for key in TYPED_SECTIONS:
        check_typed_section(config, key)
    if config.get("environment"):
        from verl.workers.rollout.run_environment import changes_contexts  # imports upstream's agent loop

        if changes_contexts(config):
            _check_contexts(config)


def _check_contexts(config: DictConfig) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    chosen, keys = parts_of(config.actor_rollout_ref.rollout), config.environment
    key = f"environment.thinking={keys.get('thinking', 'kept')}, environment.max_context={keys.get('max_context')}"
    if chosen.environment == "agent":
        key = "environment=agent"
        if not keys.get("replay") and chosen.tree != "plain":
            raise ValueError(
                f"tree={chosen.tree} with environment.replay=false: a branch is a second run of the agent, and of its "
                "tools: set environment.replay=true if they may run again, or choose tree=plain"
            )
    if chosen.environment == "none":
        raise ValueError(f"{key}: expected an environment that answers, such as environment=chat")
    roles = ("actor", "ref") if need_reference_policy(config) else ("actor",)
    if not all(config.actor_rollout_ref[role].get("use_prefix_tree") for role in roles):
        raise ValueError(f"{key}: a rollout is then several sequences, which only update=tree trains; set update=tree")
    if need_critic(config) or OmegaConf.select(config, "distillation.enabled"):
        raise ValueError(f"{key}: a critic and a teacher would read the whole trajectory; choose another estimator")
    reward_model = config.reward.reward_model
    if reward_model.enable and not reward_model.enable_resource_pool:
        raise ValueError(
            f"{key}: rewards go to trained tokens when the rollout ends, and a reward model without "
            "reward.reward_model.enable_resource_pool=true gives them later; set that"
        )


def check_names(section: DictConfig, name: str) -> None:
    """Check that the keys of a section and of those below it are fields of the dataclass that `_target_` names."""
    if target := section.get("_target_"):
        keys = [key.name for key in fields(get_class(target)) if key.name != "_target_"]
        for key in sorted(section.keys() - {"_target_", *keys}):
            raise ValueError(no_such_key(name, key, keys))
    for key, value in section.items_ex(resolve=False):
        if isinstance(value, DictConfig) and not value._is_none():
            check_names(value, f"{name}.{key}")


def run_parts(config: DictConfig) -> Iterator[Any]:
    """Yield the parts of a run, which check themselves by `check(config)`: the tree, the credit, all losses, whose keys
    stand in one section, and then the samplers and components, which depend on what the others need."""
    rollout = config.actor_rollout_ref.rollout
    if (tree := parts_of(rollout).tree) is not None:
        yield tree_part(tree)
    if (credit := credit_of(config.algorithm.adv_estimator)) is not None:
        yield credit
    yield from parts("loss").values()
    yield from (sampler for sampler in parts("sampler").values() if sampler.is_on(rollout))
    yield from (component for component in parts("component").values() if component.is_needed(config))


def check_parts(config: DictConfig) -> None:
    """Check each part of the run, and that they fit its schedule and each other."""
    for part in run_parts(config):
        part.check(config)
    check_schedule(config)
    check_distillation(config)
    check_computed_fields(config)


def part_warnings(config: DictConfig) -> list[str]:
    """Return the registered warnings about the run's credit and loss."""
    loss = parts("loss").get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    chosen = {"credit": credit_of(config.algorithm.adv_estimator), "loss": loss}
    said = {f"{kind}={part.name}": part.warning for kind, part in chosen.items() if part}
    warnings = {name: words(config) if callable(words) else words for name, words in said.items()}
    return [f"{name}: {words}" for name, words in warnings.items() if words]


def check_distillation(config: DictConfig) -> None:
    """Check that no loss reads token fields in a run with distillation, whose loss would take its place."""
    from verl.trainer.distillation import is_distillation_enabled

    if not is_distillation_enabled(config.get("distillation")):
        return
    loss = parts("loss").get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if loss and loss.fields(config.actor_rollout_ref.actor):
        raise ValueError(f"distillation.enabled=true: the loss {loss.name} would take the place of the distillation's")


def check_computed_fields(config: DictConfig) -> None:
    """Check that the trainer computes the token fields that the run's parts read."""
    mode = config.trainer.v1.trainer_mode
    computed = {need for component in parts("component").values() for need in component.computes}
    for need, key in computed_fields(config).items():
        if mode not in EXPLORE_TRAINERS:
            raise ValueError(
                f"{key} reads {need.name}, which trainer.v1.trainer_mode={mode} does not compute: expected "
                f"{EXPLORE_TRAINERS[0]}"
            )
        if need.compute is None and need not in computed:
            raise ValueError(f"{key} reads {need.name}, and no component or `compute` of the TokenField computes it")


def check_environment(config: DictConfig) -> None:
    """Check that every tool works here and with the run's tree, or the environment with the first row's task."""
    from verl.workers.rollout.run_environment import try_environment

    has_rows, row = parts_of(config.actor_rollout_ref.rollout).environment in ("gym", "agent"), {}
    if has_rows and (files := data_files(config, "train_files")[0]):
        row = next(read_rows(Path(files[0])))
    try_environment(config, row)


# ---- the schedule ----


def check_schedule(config: DictConfig) -> None:
    """Check that the run's parts and settings fit its schedule and each other."""
    bypass = "algorithm.rollout_correction.bypass_mode"
    if OmegaConf.select(config, bypass) and (needs := computed_fields(config)):
        key = next(iter(needs.values()))
        raise ValueError(f"{bypass}=true skips the pass that computes the entropies, which {key} needs")
    _check_correction(config)
    schedule = schedule_of(config)
    if OmegaConf.select(config, sampler := "trainer.v1.sampler.custom_sampler.path"):
        if schedule in ASYNCHRONOUS or filters_groups(config):
            raise ValueError(f"{sampler} with schedule={schedule} or a filter of groups: the run has its own buffer")
    if schedule in ASYNCHRONOUS:
        _check_asynchronous(config, schedule)
    if schedule == "separate_async":
        # Upstream's trainer does not assert this at its start.
        rollout = config.actor_rollout_ref.rollout
        check_whole_servers("actor_rollout_ref.rollout", rollout, rollout)
        backend = rollout.checkpoint_engine.backend
        if (backend == CPU_BACKEND) != (config.trainer.device == "cpu"):
            raise ValueError(
                f"{ENGINE}.backend={backend} with schedule=separate_async and trainer.device={config.trainer.device}: "
                f"expected {CPU_BACKEND} on CPUs, nccl or another of upstream's on GPUs, null for the usual one"
            )


def check_whole_servers(section: str, nodes: DictConfig, rollout: DictConfig) -> None:
    """Check that a section's nodes make whole servers. Upstream lays a server on one node, or on several whole ones."""
    gpus, server = nodes.n_gpus_per_node, gpus_of_server(rollout)
    if nodes.nnodes * gpus % server or (gpus % server and server % gpus):
        raise ValueError(
            f"{section}.nnodes x {section}.n_gpus_per_node = {nodes.nnodes} x {gpus}: expected nodes with a multiple "
            f"of the {server} GPUs of a server (tensor_model_parallel_size x data_parallel_size x "
            "pipeline_model_parallel_size), or a multiple of the nodes that it fills"
        )


def check_transport(config: DictConfig, cuda_is_here: bool) -> None:
    """Check that cupy is installed if separate servers get their weights by the backend `nccl`, which needs it."""
    nccl = rollout_workers(config) and config.actor_rollout_ref.rollout.checkpoint_engine.backend == "nccl"
    if nccl and cuda_is_here and importlib.util.find_spec("cupy") is None:
        raise ValueError(
            f"{ENGINE}.backend=nccl with schedule=separate_async, and the package cupy is not installed, with which "
            "upstream sends weights: pip install cupy-cuda13x==14.0.1, or that of your CUDA; or choose another backend"
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
                    f"{key}={value} with actor_rollout_ref.rollout.{sampling}={rollout[sampling]}: probabilities of a "
                    f"truncated distribution would be compared with the whole one's: set {sampling} to {whole}"
                )


def _check_asynchronous(config: DictConfig, schedule: str) -> None:
    # Upstream's buffer checks the bounds themselves, not that prompts get too old while they wait.
    sampler, ahead = config.trainer.v1.sampler, config.trainer.v1[schedule].num_warmup_batches
    bound, strategy = sampler.max_off_policy_threshold, sampler.max_off_policy_strategy
    if type(ahead) not in (int, float) or ahead < 0:
        raise ValueError(f"trainer.v1.{schedule}.num_warmup_batches={ahead}: expected a number from 0")
    if bound and strategy == "drop" and math.ceil(ahead) >= bound:
        raise ValueError(
            f"trainer.v1.{schedule}.num_warmup_batches={ahead} with trainer.v1.sampler.max_off_policy_threshold="
            f"{bound}: prompts would be dropped as too old: choose fewer batches ahead, or a greater threshold"
        )
    if (seconds := OmegaConf.select(config, "actor_rollout_ref.rollout.group_timeout")) is not None:
        raise ValueError(
            f"actor_rollout_ref.rollout.group_timeout={seconds} with schedule={schedule}: a prompt also waits while "
            "the policy is updated: set it to null; trainer.progress_timeout ends a run that hangs"
        )
    if not config.actor_rollout_ref.get("hybrid_engine", True):
        raise ValueError(
            f"actor_rollout_ref.hybrid_engine=false with schedule={schedule}: the trainer's GPUs hold servers, too, "
            "and verl 0.9.1 does not read the key, or fails when it logs it: set it to true"
        )
    filters = OmegaConf.select(config, "algorithm.filter_groups")
    if filters and filters.get("enable") and (bound := filters.get("max_num_gen_batches")):
        raise ValueError(
            f"algorithm.filter_groups.max_num_gen_batches={bound} with schedule={schedule}: prompts of later batches "
            "replace dropped groups, so that nobody can count a batch's own: set it to 0, or choose schedule=sync"
        )
