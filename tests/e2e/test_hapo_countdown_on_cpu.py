"""HAPO on the real stack of two nodes: from the first step to a checkpoint. One launch of about two minutes."""

import json

import pytest

from recipe.common.run_metrics import load_metrics
from tests.e2e.runs import HAPO, assert_on_two_nodes, start_run

SETTINGS = ["trainer.save_freq=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
# an untrained model has no group with right and wrong answers: filtering would wait for one
SETTINGS += ["algorithm.filter_groups.enable=false", "actor_rollout_ref.rollout.temperature_tau=0.3"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(inputs, two_nodes):
    settings = [*SETTINGS, "trainer.total_training_steps=2", "trainer.nnodes=2"]
    launcher = start_run(inputs, "hapo", *settings, script=HAPO, **two_nodes)
    _, errors = launcher.communicate(timeout=550)
    assert launcher.returncode == 0, errors
    assert_on_two_nodes(inputs / "hapo")
    return inputs / "hapo"


def test_the_first_step_samples_at_the_plain_temperature_and_later_ones_do_not(run):
    metrics = load_metrics(run)
    tempered = metrics["hapo/temperature_mean"]
    assert tempered.isna()[1] and 0.7 < tempered[2] < 1.3 and tempered[2] != 1.0
    difference = metrics["training/rollout_probs_diff_max"]
    assert difference[1] < 1e-4 < difference[2]  # the rollout's log-probs are those of the tempered policy


def test_the_statistics_are_saved(run):
    """tests/recipe/test_trainer_state_on_cpu.py shows that they come back."""
    saved, metrics = json.loads((run / "global_step_2/hapo.json").read_text()), load_metrics(run)
    assert saved == {name: metrics[f"hapo/entropy_{name}"][2] for name in saved} and len(saved) == 4


def test_metrics_are_plausible(run):
    table = load_metrics(run)
    for step in (1, 2):
        row = table.loc[step]
        assert row["hapo/high_entropy_share"] == pytest.approx(0.2, abs=0.02)
        assert 0.2 <= row["actor/hapo/clip_low"] <= 0.4 and 0.2 <= row["actor/hapo/clip_high"] <= 0.4
        assert 0 <= row["actor/hapo/redistributed"] <= 1 and 0 <= row["hapo/grpo_fallback_share"] <= 1
