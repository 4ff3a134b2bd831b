"""Checks of the config keys that HATO reads, before Ray starts and in the trainer; each raises a ValueError."""

from omegaconf import DictConfig, OmegaConf

from verl.workers.config.explore import parts_of
from verl.workers.config.keys import check_log_probs
from verl.workers.config.schedule import SCHEDULE_OF_TRAINER
from verl.workers.rollout.answer_likelihood import ANSWER_LIKELIHOOD
from verl.workers.rollout.trees.hato.config import REWARD_LOOP, HATOConfig
from verl.workers.rollout.trees.hato.local_reward import local_reward_function

# Names of the trainers that have components.
EXPLORE_TRAINERS = tuple(name for name in SCHEDULE_OF_TRAINER if name != "watched_sync")
META_STRATEGIES = ("fsdp", "fsdp2", "veomni")


def hato_config(config: DictConfig) -> HATOConfig:
    """Check the run's `hato` section, which may be missing, and the keys on which it depends; return it."""
    hato = HATOConfig.from_dict(config.get("hato") or {})
    if parts_of(config.actor_rollout_ref.rollout).tree == "hato":
        _check_tree(config, hato)
    if config.algorithm.adv_estimator == "hato" and config.algorithm.use_kl_in_reward:
        raise ValueError(
            "algorithm.use_kl_in_reward=true would change the verifier's rewards, of which adv_estimator=hato asks "
            "whether they are right; use actor.use_kl_loss"
        )
    if hato.meta_learning.enable:
        _check_meta_learning(config)
    return hato


def _check_tree(config: DictConfig, hato: HATOConfig) -> None:
    _check_sizes(config, hato)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if config.trainer.v1.trainer_mode not in EXPLORE_TRAINERS:
        raise ValueError(
            f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: the search of tree=hato learns in the trainer: "
            f"expected {EXPLORE_TRAINERS[0]}"
        )
    if actor.loss_agg_mode != "token-mean":
        raise ValueError(
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}: a tree of tree=hato has 1 to n rows, and a "
            "mean over rows would count those that are missing: expected token-mean"
        )
    if rollout.temperature != hato.exploration.initial_temperature:
        raise ValueError(
            f"actor_rollout_ref.rollout.temperature={rollout.temperature} differs from "
            f"hato.exploration.initial_temperature={hato.exploration.initial_temperature}: the policy that is trained "
            "is the one that is sampled, leave the first as ${hato.exploration.initial_temperature}"
        )
    check_log_probs(rollout, "hato.uncertainty.entropy_top_k", hato.uncertainty.entropy_top_k)
    if rollout.get("adaptive_temperature") and hato.exploration.temperature_decay:
        raise ValueError(
            f"actor_rollout_ref.rollout.adaptive_temperature with hato.exploration.temperature_decay="
            f"{hato.exploration.temperature_decay}: HAPO's sampler works at temperature 1: expected 0"
        )
    if hato.local_reward not in (REWARD_LOOP, ANSWER_LIKELIHOOD):
        local_reward_function(hato.local_reward)
    later = config.reward.reward_model.enable and not config.reward.reward_model.enable_resource_pool
    keys = [f"hato.local_reward={REWARD_LOOP}"] if hato.local_reward == REWARD_LOOP else []
    keys += ["hato.tree.train_dropped=true"] if hato.tree.train_dropped else []
    if later and keys:
        raise ValueError(
            f"{keys[0]} needs scores during the rollout: reward.reward_model.enable_resource_pool=true, or no reward "
            "model"
        )
    if hato.tree.train_dropped:
        _check_dropped(config, hato)
    if filters_groups(config) and OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path", default=None):
        raise ValueError(
            "trainer.v1.sampler.custom_sampler with algorithm.filter_groups.enable: the sampler that replaces trees "
            "one by one would take its place"
        )


def _check_dropped(config: DictConfig, hato: HATOConfig) -> None:
    """Check that the estimator compares the reward of dropped steps, 0, with the rewards of answers."""
    estimator, weights = config.algorithm.adv_estimator, hato.reward_weights
    if estimator == "hato" and weights.beta == weights.gamma == 0:
        raise ValueError(
            "hato.tree.train_dropped=true has no effect on credit=hato with hato.reward_weights.beta and gamma 0: no "
            "reward of a row counts"
        )
    if estimator == "grpo_passk":
        raise ValueError(
            "hato.tree.train_dropped=true has no effect on algorithm.adv_estimator=grpo_passk: only the best row of a "
            "prompt is trained"
        )


def _check_sizes(config: DictConfig, hato: HATOConfig) -> None:
    """Check that steps can have siblings; without siblings every advantage is 0."""
    sizes = {
        "actor_rollout_ref.rollout.n": config.actor_rollout_ref.rollout.n,
        "hato.tree.branching_factor": hato.tree.branching_factor,
        "hato.tree.max_nodes": hato.tree.max_nodes,
        "hato.tree.max_nodes_per_level": hato.tree.max_nodes_per_level,
    }
    if shared := hato.exploration.nodes_per_tree:
        sizes["hato.exploration.nodes_per_tree"] = shared
    for key, value in sizes.items():
        if value < 2:
            raise ValueError(f"{key}={value}: every step would be alone, with advantage 0: expected at least 2")
    if shared > hato.tree.max_nodes:
        raise ValueError(
            f"hato.exploration.nodes_per_tree={shared}: no tree holds more than "
            f"hato.tree.max_nodes={hato.tree.max_nodes}"
        )
    if hato.tree.independent_paths:
        _check_independent_paths(config.actor_rollout_ref.rollout.n, hato)


def _check_independent_paths(n: int, hato: HATOConfig) -> None:
    """Check that each of n paths can have a node on each level, unless a beam drops it."""
    tree = hato.tree
    for key, value, least in (
        ("max_nodes_per_level", tree.max_nodes_per_level, 2 if tree.search_algorithm == "beam" else n),
        ("max_nodes", tree.max_nodes, n * max(2, tree.max_depth)),
    ):
        if value < least:
            raise ValueError(
                f"hato.tree.{key}={value}: hato.tree.independent_paths=true with actor_rollout_ref.rollout.n={n} and "
                f"hato.tree.max_depth={tree.max_depth} needs at least {least}"
            )
    if hato.exploration.nodes_per_tree:
        raise ValueError(
            f"hato.exploration.nodes_per_tree={hato.exploration.nodes_per_tree} with hato.tree.independent_paths=true: "
            "every prompt has n paths: expected 0"
        )


def filters_groups(config: DictConfig) -> bool:
    """Return whether the run drops groups whose rewards do not vary, by `algorithm.filter_groups.enable`."""
    return bool(OmegaConf.select(config, "algorithm.filter_groups.enable", default=False))


def _check_meta_learning(config: DictConfig) -> None:
    if filters_groups(config):
        raise ValueError(
            "hato.meta_learning.enable with algorithm.filter_groups.enable: prompts that replace dropped ones would "
            "come from other domains than the episode's"
        )
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in META_STRATEGIES:
        raise ValueError(f"hato.meta_learning needs actor.strategy of {', '.join(META_STRATEGIES)}, not {strategy}")
    if OmegaConf.select(config, "trainer.v1.sampler.sync_refill_failed_groups", default=False):
        raise ValueError("hato.meta_learning with trainer.v1.sampler.sync_refill_failed_groups would mix domains")
