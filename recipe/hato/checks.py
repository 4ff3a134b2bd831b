"""Checks of the config keys that HATO's parts read, before Ray starts; each raises a ValueError."""

from omegaconf import DictConfig, OmegaConf

from recipe.hato.keys import ANSWER_LIKELIHOOD, REWARD_LOOP, HATOConfig, hato_keys
from recipe.hato.local_reward import local_reward_function
from verl.workers.config.keys import check_log_probs
from verl.workers.config.schedule import ASYNCHRONOUS, filters_groups, schedule_of

META_STRATEGIES = ("fsdp", "fsdp2", "veomni")


def check_tree(config: DictConfig) -> None:
    """Check the keys on which HATO's search depends."""
    hato = hato_keys(config)
    _check_sizes(config, hato)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
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
    decay, schedule = hato.exploration.temperature_decay, schedule_of(config)
    if decay and schedule in ASYNCHRONOUS:
        raise ValueError(
            f"hato.exploration.temperature_decay={decay} with schedule={schedule}: a batch holds responses of several "
            "steps, and the loss knows one temperature: set it to 0, or choose schedule=sync"
        )
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


def check_credit(config: DictConfig) -> None:
    """Check the keys on which adv_estimator=hato depends."""
    hato_keys(config)
    if config.algorithm.use_kl_in_reward:
        raise ValueError(
            "algorithm.use_kl_in_reward=true would change the verifier's rewards, of which adv_estimator=hato asks "
            "whether they are right; use actor.use_kl_loss"
        )


def check_meta_learning(config: DictConfig) -> None:
    """Check the keys on which `hato.meta_learning` depends, if it is switched on."""
    if not hato_keys(config).meta_learning.enable:
        return
    if (schedule := schedule_of(config)) in ASYNCHRONOUS:
        raise ValueError(
            f"hato.meta_learning.enable=true with schedule={schedule}: an episode's batches are of one domain each, "
            "and prompts ahead would mix them: choose schedule=sync"
        )
    if filters_groups(config):
        raise ValueError(
            "hato.meta_learning.enable with algorithm.filter_groups.enable: prompts that replace dropped ones would "
            "come from other domains than the episode's: set one of the two to false"
        )
    if OmegaConf.select(config, "data.sampler.band"):
        raise ValueError(
            f"hato.meta_learning.enable with data.sampler.band={config.data.sampler.band}: an episode's prompts are of "
            "one domain: set one of the two to its default"
        )
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in META_STRATEGIES:
        raise ValueError(f"hato.meta_learning needs actor.strategy of {', '.join(META_STRATEGIES)}, not {strategy}")
    if OmegaConf.select(config, "trainer.v1.sampler.sync_refill_failed_groups", default=False):
        raise ValueError("hato.meta_learning with trainer.v1.sampler.sync_refill_failed_groups would mix domains")
