"""The keys under `hato`: defaults, nesting, and errors that name the key."""

import json

import pytest

from recipe.hato.keys import HATOConfig
from tests.refusals import refused, says
from verl.workers.config.keys import read_keys


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


@pytest.mark.parametrize(("method", "n_passes"), [("ensemble", 10), ("dropout", 7), ("bootstrap", 5)])
def test_the_notes_names_are_read(method, n_passes):
    named = NOTES | {"uncertainty": NOTES["uncertainty"] | {"type": method, "n_forward_passes": 7}}
    config = read_keys(HATOConfig, named, "hato")
    uncertainty = config.uncertainty
    assert (uncertainty.method, uncertainty.n_passes, uncertainty.model_config.dropout) == (method, n_passes, 0.1)
    assert (config.exploration.pruning_threshold, config.tree.max_nodes) == (0.2, 1000)
    assert (config.meta_learning.method, config.meta_learning.n_inner_steps) == ("reptile", 5)
    assert read_keys(HATOConfig, {"reward_weights": {"alpha": 0}}, "hato").reward_weights.gamma == 0.2
    assert config.tree.max_depth == 3 and config.memory.problems == 100_000
    assert named["uncertainty"]["type"] == method, "what was passed is as it was"


def test_a_name_of_the_notes_stands_beside_our_default_and_not_beside_another_value():
    ours = {"method": "ensemble", "n_passes": 10, "model_config": {"dropout": 0.2}}
    named = {"uncertainty": ours | {"type": "bootstrap", "n_bootstrap": 5, "dropout_rate": 0.1}}
    assert read_keys(HATOConfig, named, "hato").uncertainty.n_passes == 5
    both = {"uncertainty": {"method": "dropout", "type": "dropout"}}
    assert read_keys(HATOConfig, both, "hato").uncertainty.method == "dropout"
