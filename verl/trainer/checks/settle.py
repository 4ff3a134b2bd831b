"""Gives every key of a run's config its final value before Ray starts."""

import os

from omegaconf import DictConfig, OmegaConf

from verl.trainer.checks.model.lora import settle_lora
from verl.trainer.checks.model.settings import fill_max_model_len
from verl.trainer.checks.values import check_values
from verl.utils.parts import loss_of_switch, tree_of_rollout_mode, tree_of_rollout_name
from verl.workers.config.explore import parts_of
from verl.workers.config.sampler_choice import bound_scores, choose_sampler, choose_seeds
from verl.workers.config.schedule import settle_schedule

REQUIRED_KEYS = ("trainer.experiment_name", "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.name")
WORKERS_A_NODE = 8  # upstream's default for a whole cluster, however large
WORKER_COUNTS = ("actor_rollout_ref.rollout.agent.num_workers", "reward.num_workers")
PATHS = ("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path", "data.train_files")
PATHS += ("data.val_files", "trainer.resume_from_path")


def settle(config: DictConfig) -> None:
    """Give every key its final value, in the driver, which has the environment of the user's command."""
    check_required(config)
    make_absolute(config)
    resolve(config)
    check_values(config)
    scale_workers(config)
    name_parts(config)
    name_loss(config)
    settle_schedule(config)
    settle_lora(config)
    fill_max_model_len(config)
    settle_epochs(config)
    choose_sampler(config)
    choose_seeds(config)
    bound_scores(config)


def check_required(config: DictConfig) -> None:
    for key in REQUIRED_KEYS:
        if OmegaConf.select(config, key) is None:
            raise ValueError(f"{key} has no value: set it, as in {key}=...")


def make_absolute(config: DictConfig) -> None:
    """Make relative paths absolute, because upstream reads them in a Ray actor, which may run in another folder."""
    for key in PATHS:
        OmegaConf.update(config, key, _absolute(OmegaConf.select(config, key)))
    config.trainer.default_local_dir = os.path.abspath(config.trainer.default_local_dir)


def resolve(config: DictConfig) -> None:
    """Resolve `${...}` here: upstream would do it in a Ray actor, without the variables that the user exports."""
    for section in config:
        if section != "hydra" and OmegaConf.is_config(config[section]):
            OmegaConf.resolve(config[section])


def scale_workers(config: DictConfig) -> None:
    """Set null numbers of agent-loop and reward workers, which upstream spreads over the nodes, to 8 per node."""
    nodes = config.trainer.nnodes + (config.actor_rollout_ref.rollout.get("nnodes") or 0)
    for key in WORKER_COUNTS:
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, WORKERS_A_NODE * nodes)


def name_parts(config: DictConfig) -> None:
    """Translate the papers' spelling (`rollout.name`, `rollout.mode`) into `tree` and `environment`, and reset name and
    mode to vLLM's."""
    rollout = config.actor_rollout_ref.rollout
    chosen = parts_of(rollout)
    if chosen == (None, "none") or "tree" not in rollout:
        return
    rollout.tree, rollout.environment = chosen
    rollout.name = "vllm" if rollout.name in tree_of_rollout_name() else rollout.name
    rollout.mode = "async" if rollout.mode in tree_of_rollout_mode() else rollout.mode


def settle_epochs(config: DictConfig) -> None:
    """Raise `trainer.total_epochs` so that `trainer.total_training_steps`, if set, is the only bound: upstream (verl
    0.9.1) would end after `total_epochs`, without its last checkpoint and validation. An epoch has at least one step.
    """
    if steps := config.trainer.get("total_training_steps"):
        config.trainer.total_epochs = max(config.trainer.total_epochs, steps)


def name_loss(config: DictConfig) -> None:
    """Replace the loss `vanilla` by the loss whose switch is on, unless switches of several losses are on."""
    actor = config.actor_rollout_ref.actor
    losses = {loss for switch, loss in loss_of_switch().items() if actor.get(switch)}
    if actor.policy_loss.loss_mode == "vanilla" and len(losses) == 1:
        actor.policy_loss.loss_mode = losses.pop()


def _absolute(path):
    """Return a path or a list with existing paths made absolute; anything else, such as a hub name, is unchanged."""
    if isinstance(path, str):
        return os.path.abspath(path) if os.path.exists(path) else path
    return path if path is None else [_absolute(single) for single in path]
