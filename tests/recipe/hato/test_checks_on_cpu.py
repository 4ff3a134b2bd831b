"""HATO's configs compose, say the same as the dataclasses, and end in one line where keys exclude each other."""

from dataclasses import asdict, fields

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from recipe.hato.keys import HATOConfig, hato_keys
from tests.configs import composed
from verl.trainer.checks.parts import check_parts
from verl.utils.parts import parts
from verl.workers.config.explore import parts_of

DROPPING = ["hato.tree.train_dropped=true", "hato.exploration.pruning_threshold=0.1"]
CREDITS = [name for name, credit in parts("credit").items() if not credit.alias]


def config(*overrides: str, name: str = "hato_trainer", hardware: str = "gpu"):
    recipe = "common" if name == "explore" else "hato"
    return composed(name, f"hardware={hardware}", *overrides, recipe=recipe)


def checked_keys(config) -> HATOConfig:
    check_parts(config)
    return hato_keys(config)


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_the_yaml_names_every_key_with_its_default(hardware):
    whole = config(hardware=hardware)
    assert checked_keys(whole) == HATOConfig()
    written = OmegaConf.to_container(whole.hato, resolve=True)

    def same_keys(section, values):
        assert set(values) == {key.name for key in fields(section)}
        for key, value in values.items():
            if isinstance(value, dict):
                same_keys(getattr(section, key), value)

    same_keys(HATOConfig(), written)
    rollout = omega_conf_to_dataclass(whole.actor_rollout_ref.rollout)
    assert parts_of(rollout) == ("hato", "none")
    assert rollout.name == "vllm" and rollout.temperature == 1.0 and rollout.group_timeout == 3600


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_the_notes_values_are_a_choice(hardware):
    """By hand, from the notes' hato_config.yaml, their beam search, and the algorithm of their trainer."""
    whole = config(name="hato_notes_trainer", hardware=hardware)
    hato, filters = checked_keys(whole), whole.algorithm.filter_groups
    tree, weights, exploration, uncertainty = hato.tree, hato.reward_weights, hato.exploration, hato.uncertainty
    assert (tree.max_depth, tree.branching_factor, tree.search_algorithm, tree.max_nodes_per_level) == (3, 5, "beam", 5)
    assert tree.max_nodes == 1000 and not tree.spread_leaves and not tree.adaptive_branching
    assert (weights.alpha, weights.beta, weights.gamma) == (0.4, 0.5, 0.1)
    assert (exploration.initial_temperature, exploration.temperature_decay) == (0.7, 2.0)
    assert (exploration.pruning_threshold, exploration.beta_u) == (0.2, 2.0)
    assert (uncertainty.method, uncertainty.n_models, uncertainty.n_passes) == ("ensemble", 5, 10)
    assert asdict(uncertainty.model_config) == {"hidden_size": 128, "n_layers": 2, "dropout": 0.1}
    meta = hato.meta_learning
    assert (meta.method, meta.inner_lr, meta.meta_lr, meta.n_inner_steps) == ("reptile", 0.01, 0.1, 5)
    assert hato.verification_threshold == 0.7 and hato.train_on_local_reward_alone
    assert (whole.algorithm.adv_estimator, filters.enable, filters.max_num_gen_batches) == ("hato", True, 5)
    assert whole.actor_rollout_ref.rollout.temperature == 0.7


def test_the_notes_names_on_the_command_line():
    names = ["+hato.uncertainty.type=bootstrap", "+hato.uncertainty.n_bootstrap=7", "+hato.memory.max_nodes=99"]
    hato = checked_keys(config(*names))
    assert (hato.uncertainty.method, hato.uncertainty.n_passes, hato.tree.max_nodes) == ("bootstrap", 7, 99)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.v1.trainer_mode=sync"],
            "trainer.v1.trainer_mode=sync: the trainer learns what tree=hato needs",
        ),
        (["actor_rollout_ref.rollout.name=kt"], "rollout.name=kt is actor_rollout_ref.rollout.tree=latr, and not hato"),
        (["credit=hato", "algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward=true would change"),
        (
            ["hato.meta_learning.enable=true", "trainer.v1.sampler.sync_refill_failed_groups=true"],
            "sync_refill_failed_groups would mix domains",
        ),
        (["hato.meta_learning.enable=true", "actor_rollout_ref.actor.strategy=torchtitan"], "not torchtitan"),
        (
            ["actor_rollout_ref.rollout.temperature=0.7"],
            "rollout.temperature=0.7 differs from hato.exploration",
        ),
        (["sampler=tempered"], "hato.exploration.temperature_decay=0.1: HAPO's sampler works at temperature 1"),
        (["actor_rollout_ref.rollout.logprobs_mode=raw_logits"], "actor_rollout_ref.rollout.logprobs_mode=raw_logits"),
        (["hato.local_reward=no.such.function"], "hato.local_reward=no.such.function"),
        (
            ["hato.local_reward=reward_loop", "reward.reward_model.enable=true"],
            "hato.local_reward=reward_loop needs scores during the rollout",
        ),
        (["hato.uncertainty.entropy_top_k=21"], "hato.uncertainty.entropy_top_k=21: expected less than or equal to 20"),
        (
            ["hato.meta_learning.enable=true", "algorithm.filter_groups.enable=true"],
            "hato.meta_learning.enable with algorithm.filter_groups.enable",
        ),
        (["actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n=1: every step would be alone"),
        (["hato.tree.branching_factor=1"], "hato.tree.branching_factor=1: every step would be alone"),
        (["hato.exploration.nodes_per_tree=1"], "hato.exploration.nodes_per_tree=1: every step would be alone"),
        (["hato.exploration.nodes_per_tree=129"], "no tree holds more than hato.tree.max_nodes=128"),
        (["hato.tree.max_nodes=1"], "hato.tree.max_nodes=1: every step would be alone"),
        (["hato.tree.max_nodes_per_level=1"], "hato.tree.max_nodes_per_level=1: every step would be alone"),
        (["hato.tree.train_dropped=true"], "hato.tree.train_dropped=true has no effect: nothing is dropped with hato."),
        (
            [*DROPPING, "reward.reward_model.enable=true"],
            "hato.tree.train_dropped=true needs scores during the rollout",
        ),
        (
            [*DROPPING, "credit=hato", "hato.reward_weights.beta=0", "hato.reward_weights.gamma=0"],
            "hato.tree.train_dropped=true has no effect on credit=hato",
        ),
        (
            [*DROPPING, "algorithm.adv_estimator=grpo_passk"],
            "hato.tree.train_dropped=true has no effect on algorithm.adv_estimator=grpo_passk",
        ),
        (
            ["hato.tree.independent_paths=true", "actor_rollout_ref.rollout.n=17"],
            "hato.tree.max_nodes_per_level=16: hato.tree.independent_paths=true with actor_rollout_ref.rollout.n=17 an",
        ),
        (
            ["hato.tree.independent_paths=true", "hato.tree.max_depth=17"],
            "hato.tree.max_nodes=128: hato.tree.independent_paths=true with actor_rollout_ref.rollout.n=8 and hato.tree"
            ".max_depth=17 needs at least 136",
        ),
        (
            ["hato.tree.independent_paths=true", "hato.exploration.nodes_per_tree=9"],
            "hato.exploration.nodes_per_tree=9 with hato.tree.independent_paths=true",
        ),
        (
            ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"],
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        ),
        (
            ["algorithm.filter_groups.enable=true", "trainer.v1.sampler.custom_sampler.path=mine.py"],
            "trainer.v1.sampler.custom_sampler with algorithm.filter_groups.enable",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_named(overrides, message):
    with pytest.raises(ValueError) as error:
        checked_keys(config(*overrides))
    assert message in str(error.value)


@pytest.mark.parametrize("credit", CREDITS)
def test_hatos_trees_take_every_credit(credit):
    assert checked_keys(config(f"credit={credit}", *DROPPING)).tree.train_dropped


def test_a_beam_may_keep_fewer_than_n_independent_paths():
    shape = ["independent_paths=true", "search_algorithm=beam", "max_nodes_per_level=4", "train_dropped=true"]
    assert checked_keys(config(*(f"hato.tree.{key}" for key in shape))).tree.max_nodes_per_level == 4


@pytest.mark.parametrize("tree", ["plain", "latr", "arpo", "eptree"])
def test_hatos_credit_works_on_other_trees(tree):
    """What only the search asks for does not concern them."""
    others = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]
    others += [] if tree == "eptree" else ["actor_rollout_ref.rollout.n=1"]
    composed = config(f"tree={tree}", "credit=hato", *others, name="explore")
    assert checked_keys(composed).reward_weights == HATOConfig().reward_weights
    composed.hato.reward_weights.beta = -1
    with pytest.raises(ValueError, match="hato.reward_weights.beta=-1"):
        checked_keys(composed)


def test_a_run_without_a_section_has_the_defaults():
    composed = config("tree=plain", name="explore")
    assert "hato" not in composed and checked_keys(composed) == HATOConfig()


def test_the_temperature_follows_the_initial_one():
    composed = config("hato.exploration.initial_temperature=0.8")
    checked_keys(composed)
    assert composed.actor_rollout_ref.rollout.temperature == 0.8
