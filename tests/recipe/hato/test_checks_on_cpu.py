"""HATO's configs compose and say the same as the dataclasses; a wrong key or pair of keys is named in one line."""

import json
from dataclasses import fields

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from recipe.hato.keys import HATOConfig, hato_keys
from tests.configs import composed
from tests.refusals import refused, says
from verl.trainer.checks.parts import check_parts
from verl.utils.parts import parts
from verl.workers.config.explore import parts_of
from verl.workers.config.keys import read_keys

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


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "message"), refused(__file__, "checks"))
def test_keys_that_do_not_go_together_are_named(overrides, message):
    with pytest.raises(ValueError) as error:
        checked_keys(config(*overrides.split()))
    assert says(error.value, message)


@pytest.mark.parametrize("credit", CREDITS)
def test_hatos_trees_take_every_credit(credit):
    assert checked_keys(config(f"credit={credit}", *DROPPING)).tree.train_dropped


@pytest.mark.parametrize("tree", ["plain", "latr", "arpo", "eptree"])
def test_hatos_credit_works_on_other_trees(tree):
    """The checks of HATO's search do not apply to them; a run with neither its tree nor its credit has no section."""
    assert "hato" not in config(f"tree={tree}", name="explore")
    others = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]
    composed = config(f"tree={tree}", "credit=hato", *others, name="explore")
    assert checked_keys(composed).reward_weights == HATOConfig().reward_weights
    composed.hato.reward_weights.beta = -1
    with pytest.raises(ValueError, match="hato.reward_weights.beta=-1"):
        checked_keys(composed)


@pytest.mark.parametrize(("values", "message"), refused(__file__, "keys"))
def test_a_wrong_key_is_named(values, message):
    with pytest.raises(ValueError) as error:
        read_keys(HATOConfig, json.loads(values), "hato")
    assert says(error.value, message)


# the design notes' own file, in their names
NOTES = {
    "tree": {"max_depth": 3, "branching_factor": 5, "search_algorithm": "beam", "max_nodes_per_level": 5},
    "reward_weights": {"alpha": 0.4, "beta": 0.5, "gamma": 0.1},
    "exploration": {"initial_temperature": 0.7, "temperature_decay": 2.0},
    "uncertainty": {
        "type": "ensemble",
        "n_models": 5,
        "dropout_rate": 0.1,
        "n_forward_passes": 10,
        "n_bootstrap": 5,
        "model_config": {"hidden_size": 128, "n_layers": 2},
    },
    "meta_learning": {"type": "reptile", "inner_lr": 0.01, "outer_lr": 0.001, "meta_lr": 0.1, "n_inner_steps": 5},
    "memory": {"pruning_threshold": 0.2, "max_nodes": 1000},
    "verification_threshold": 0.7,
}


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_the_notes_values_are_a_choice(hardware):
    """The config has the values of the notes' file, and those of their code for search, reward and algorithm."""
    whole = config(name="hato_notes_trainer", hardware=hardware)
    of_code = {"tree": {"spread_leaves": False}, "exploration": {"beta_u": 2.0}}
    of_code = {section: NOTES[section] | values for section, values in of_code.items()}
    of_code |= {"causal_reward": "notes", "train_on_local_reward_alone": True}
    assert checked_keys(whole) == read_keys(HATOConfig, NOTES | of_code, "hato")
    filters = whole.algorithm.filter_groups
    assert (whole.algorithm.adv_estimator, filters.enable, filters.max_num_gen_batches) == ("hato", True, 5)
    assert whole.actor_rollout_ref.rollout.temperature == 0.7, "which follows the initial one"


@pytest.mark.parametrize(("method", "n_passes"), [("ensemble", 10), ("dropout", 7), ("bootstrap", 5)])
def test_the_notes_names_are_read(method, n_passes):
    named = NOTES | {"uncertainty": NOTES["uncertainty"] | {"type": method, "n_forward_passes": 7}}
    config = read_keys(HATOConfig, named, "hato")
    uncertainty = config.uncertainty
    assert (uncertainty.method, uncertainty.n_passes, uncertainty.model_config.dropout) == (method, n_passes, 0.1)
    assert (config.exploration.pruning_threshold, config.tree.max_nodes) == (0.2, 1000)
    assert (config.meta_learning.method, config.meta_learning.n_inner_steps) == ("reptile", 5)
    assert named["uncertainty"]["type"] == method, "what was passed is as it was"


def test_a_name_of_the_notes_stands_beside_our_default_and_not_beside_another_value():
    ours = {"method": "ensemble", "n_passes": 10, "model_config": {"dropout": 0.2}}
    named = {"uncertainty": ours | {"type": "bootstrap", "n_bootstrap": 5, "dropout_rate": 0.1}}
    assert read_keys(HATOConfig, named, "hato").uncertainty.n_passes == 5
    both = {"uncertainty": {"method": "dropout", "type": "dropout"}}
    assert read_keys(HATOConfig, both, "hato").uncertainty.method == "dropout"
