"""Checks that the parts of a run fit together, and that each finds its own keys."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from verl.trainer.checks.rows import data_files, rows_of
from verl.trainer.checks.schedule import check_schedule
from verl.utils.parts import computed_fields, credit_of, parts, tree_part
from verl.workers.config.explore import parts_of
from verl.workers.config.keys import ACTOR, ROLLOUT, no_such_key
from verl.workers.config.schedule import EXPLORE_TRAINERS

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
                "own tools, that gets the recorded answers; set environment.replay=true if they may run again, or "
                "choose tree=plain"
            )
    if chosen.environment == "none":
        raise ValueError(f"{key}: expected an environment that answers, such as environment=chat")
    roles = ("actor", "ref") if need_reference_policy(config) else ("actor",)
    if not all(config.actor_rollout_ref[role].get("use_prefix_tree") for role in roles):
        raise ValueError(f"{key}: a rollout is then several sequences, which only update=tree trains; set update=tree")
    if need_critic(config) or OmegaConf.select(config, "distillation.enabled"):
        raise ValueError(f"{key}: a critic and a teacher would read the whole trajectory; choose another estimator")


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
    yield from (component for component in parts("component").values() if component.wanted(config))


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
    return [f"{kind}={part.name}: {part.warning}" for kind, part in chosen.items() if part and part.warning]


def check_distillation(config: DictConfig) -> None:
    """Check that no loss reads token fields in a run with distillation, whose loss would take its place."""
    from verl.trainer.distillation import is_distillation_enabled

    if not is_distillation_enabled(config.get("distillation")):
        return
    loss = parts("loss").get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if loss and loss.fields(config.actor_rollout_ref.actor):
        raise ValueError(
            f"distillation.enabled=true: the loss {loss.name} would take the place of the distillation's; take one of "
            "them"
        )


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
            raise ValueError(
                f"{key} reads {need.name}, and nothing computes it: give the TokenField `compute`, or a component "
                "`computes`"
            )


def check_environment(config: DictConfig) -> None:
    """Check that every tool works here and with the run's tree, or the environment with the first row's task."""
    from verl.workers.rollout.run_environment import try_environment

    has_rows, row = parts_of(config.actor_rollout_ref.rollout).environment in ("gym", "agent"), {}
    if has_rows and (files := data_files(config, "train_files")[0]):
        row = next(rows_of(files[0], batch_size=1))
    try_environment(config, row)
