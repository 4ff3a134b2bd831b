"""Checks that the parts of a run fit together, and that each finds its own keys."""

from dataclasses import fields

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from verl.trainer.checks.hato import EXPLORE_TRAINERS, hato_config
from verl.trainer.checks.schedule import check_schedule
from verl.utils.parts import Tree, computed_fields, credit_of, parts
from verl.workers.config.explore import parts_of
from verl.workers.config.keys import ACTOR, ROLLOUT, no_such_key


def check_typed_sections(config: DictConfig) -> None:
    """Check upstream's typed configs by building them here, since a wrong key would otherwise fail in a worker."""
    from verl.utils.config import omega_conf_to_dataclass

    for key in (ACTOR, ROLLOUT, "algorithm"):
        section = OmegaConf.select(config, key)
        check_names(section, key)
        try:
            omega_conf_to_dataclass(section)
        except Exception as error:
            root_cause = error.__cause__ or error
            raise ValueError(f"{key}: {str(root_cause).splitlines()[0]}") from error


def check_names(section: DictConfig, name: str) -> None:
    """Check that the keys of a section and of those below it are fields of the dataclass that `_target_` names."""
    if target := section.get("_target_"):
        keys = [key.name for key in fields(get_class(target)) if key.name != "_target_"]
        for key in sorted(section.keys() - {"_target_", *keys}):
            raise ValueError(no_such_key(name, key, keys))
    for key, value in section.items_ex(resolve=False):
        if isinstance(value, DictConfig) and not value._is_none():
            check_names(value, f"{name}.{key}")


def check_parts(config: DictConfig) -> None:
    """Check the keys of the run's tree, credit and schedule, and that the parts of the run fit together."""
    check_tree(config)
    check_credit(config)


def part_warnings(config: DictConfig) -> list[str]:
    """Return the registered warnings about the run's credit and loss."""
    loss = parts("loss").get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    chosen = {"credit": credit_of(config.algorithm.adv_estimator), "loss": loss}
    return [f"{kind}={part.name}: {part.warning}" for kind, part in chosen.items() if part and part.warning]


def check_tree(config: DictConfig) -> None:
    """Check the tree's keys, that no other agent loop takes its place, and that the run has what the tree needs: a
    trainer that learns for it, and rewards during the rollout. A run without a tree is not checked."""
    from verl.workers.rollout.tree_builder import policy_class

    rollout = config.actor_rollout_ref.rollout
    tree, loop = parts_of(rollout).tree, rollout.agent.default_agent_loop
    if tree is None:
        return
    policy_class(tree).from_config(config)
    if loop != "single_turn_agent":
        raise ValueError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={loop} makes trajectories itself: choose "
            f"actor_rollout_ref.rollout.tree=null for it, or single_turn_agent for tree={tree}"
        )
    _check_tree_needs(config, parts("tree")[tree])


def _check_tree_needs(config: DictConfig, tree: Tree) -> None:
    """Check that the run has what the tree's registration says it needs."""
    mode, model = config.trainer.v1.trainer_mode, config.reward.reward_model
    if tree.learns and mode not in EXPLORE_TRAINERS:
        raise ValueError(
            f"trainer.v1.trainer_mode={mode}: the trainer learns what tree={tree.name} needs: expected "
            f"{EXPLORE_TRAINERS[0]}"
        )
    if tree.reads_rewards and model.enable and not model.enable_resource_pool:
        raise ValueError(
            f"reward.reward_model.enable_resource_pool=false: tree={tree.name} needs rewards during the rollout: "
            "expected true, or no reward model"
        )


def check_credit(config: DictConfig) -> None:
    """Check the credit's keys, then HATO, the schedule, distillation and token fields, which concern several parts."""
    from verl.trainer.distillation import is_distillation_enabled

    credit = credit_of(config.algorithm.adv_estimator)
    keys = credit.read(config.algorithm) if credit else None
    if hasattr(keys, "check"):
        keys.check(config)
    hato_config(config)
    check_schedule(config)
    if is_distillation_enabled(config.get("distillation")):
        loss = parts("loss").get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        if loss and loss.fields(config.actor_rollout_ref.actor):
            raise ValueError(
                f"distillation.enabled=true: the loss {loss.name} would take the place of the distillation's; take one "
                "of them"
            )
    check_fields(config)


def check_fields(config: DictConfig) -> None:
    """Check that the trainer computes and sends the token fields that credit and loss read."""
    estimator, mode = config.algorithm.adv_estimator, config.trainer.v1.trainer_mode
    credit = credit_of(estimator)
    needs = [need.name for need in (*credit.needs, *credit.reward_fields)] if credit else []
    if needs and mode not in EXPLORE_TRAINERS:
        raise ValueError(
            f"algorithm.adv_estimator={estimator} reads {', '.join(needs)}, which "
            f"trainer.v1.trainer_mode={mode} does not send: expected {EXPLORE_TRAINERS[0]}"
        )
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


def check_tools(config: DictConfig) -> None:
    """Check that every tool works on this machine; each rollout worker makes the same check on its own machine."""
    from verl.utils.config import omega_conf_to_dataclass

    from verl.workers.rollout.tools.tool_box import try_tools

    rollout = config.actor_rollout_ref.rollout
    if parts_of(rollout).environment != "none":
        try_tools(omega_conf_to_dataclass(rollout).tools)
