"""Checks that the parts of a run fit together, and that each finds its own keys."""

from omegaconf import DictConfig, OmegaConf

from verl.trainer.checks.errors import PreflightError, named_errors
from verl.trainer.checks.hato import EXPLORE_TRAINERS, hato_config
from verl.trainer.checks.schedule import check_schedule
from verl.utils.parts import computed_fields, credit_of, parts
from verl.workers.config.explore import parts_of


def check_typed_sections(config: DictConfig) -> None:
    """Build upstream's typed configs, in which an unknown key would otherwise fail in a worker."""
    from verl.utils.config import omega_conf_to_dataclass

    for key in ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"):
        try:
            omega_conf_to_dataclass(OmegaConf.select(config, key))
        except Exception as error:
            root_cause = error.__cause__ or error
            raise PreflightError(f"{key}: {str(root_cause).splitlines()[0]}") from error


def check_parts(config: DictConfig) -> None:
    """Check that the parts of the run fit together, and that each finds its own keys."""
    check_tree(config)
    check_credit(config)


def check_tree(config: DictConfig) -> None:
    from verl.workers.rollout.tree_builder import policy_class

    rollout = config.actor_rollout_ref.rollout
    with named_errors():
        tree = parts_of(rollout).tree
        if tree is not None:
            policy_class(tree).from_config(config)
    loop = rollout.agent.default_agent_loop
    if tree is not None and loop != "single_turn_agent":
        raise PreflightError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={loop} makes trajectories itself: choose "
            f"actor_rollout_ref.rollout.tree=null for it, or single_turn_agent for tree={tree}"
        )


def check_credit(config: DictConfig) -> None:
    """Check the credit, and what reads the keys of several parts."""
    from verl.trainer.distillation import is_distillation_enabled

    with named_errors():
        hato_config(config)
        check_schedule(config)
    if is_distillation_enabled(config.get("distillation")):
        loss = parts("loss").get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        if loss and loss.fields(config.actor_rollout_ref.actor):
            raise PreflightError(
                f"distillation.enabled=true: the loss {loss.name} would take the place of the distillation's; take one "
                "of them"
            )
    check_fields(config)


def check_fields(config: DictConfig) -> None:
    """Check that the trainer computes and sends the token fields that credit and loss read."""
    estimator, mode = config.algorithm.adv_estimator, config.trainer.v1.trainer_mode
    credit = credit_of(estimator)
    if credit and credit.needs and mode not in EXPLORE_TRAINERS:
        raise PreflightError(
            f"algorithm.adv_estimator={estimator} reads {', '.join(need.name for need in credit.needs)}, which "
            f"trainer.v1.trainer_mode={mode} does not send: expected {EXPLORE_TRAINERS[0]}"
        )
    computed = {need for component in parts("component").values() for need in component.computes}
    for need, key in computed_fields(config).items():
        if mode not in EXPLORE_TRAINERS:
            raise PreflightError(
                f"{key} reads {need.name}, which trainer.v1.trainer_mode={mode} does not compute: expected "
                f"{EXPLORE_TRAINERS[0]}"
            )
        if need.compute is None and need not in computed:
            raise PreflightError(
                f"{key} reads {need.name}, and nothing computes it: give the TokenField `compute`, or a component "
                "`computes`"
            )


def check_tools(config: DictConfig) -> None:
    """Let every tool show that its calls will work on this machine; each rollout worker does so on its own."""
    from verl.utils.config import omega_conf_to_dataclass

    from verl.workers.rollout.tools.tool_box import try_tools

    rollout = config.actor_rollout_ref.rollout
    if parts_of(rollout).environment != "none":
        with named_errors():
            try_tools(omega_conf_to_dataclass(rollout).tools)
