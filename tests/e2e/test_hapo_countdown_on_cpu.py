"""HAPO on the real stack: from the first step to a checkpoint, and on from it.

Two launches of about 100 s each: only a second one shows that the statistics survive.
"""

import json

import pytest

from recipe.common.run_metrics import load_metrics
from tests.e2e.runs import HAPO, start_run

SETTINGS = ["trainer.save_freq=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
# an untrained model has no group with right and wrong answers: filtering would wait for one
SETTINGS += ["algorithm.filter_groups.enable=false", "actor_rollout_ref.rollout.temperature_tau=0.3"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def runs(inputs):
    """Metrics after steps 1 and 2, and after going on to step 3; the checkpoint's statistics in between."""
    tables, saved = [], None
    for steps in (2, 3):
        launcher = start_run(inputs, "hapo", *SETTINGS, f"trainer.total_training_steps={steps}", script=HAPO)
        _, errors = launcher.communicate(timeout=400)
        assert launcher.returncode == 0, errors
        tables.append(load_metrics(inputs / "hapo"))
        saved = saved or json.loads((inputs / "hapo/global_step_2/hapo.json").read_text())
    return *tables, saved


def test_the_first_step_samples_at_the_plain_temperature_and_later_ones_do_not(runs):
    first, _, _ = runs
    tempered = first["hapo/temperature_mean"]
    assert tempered.isna()[1] and 0.7 < tempered[2] < 1.3 and tempered[2] != 1.0
    difference = first["training/rollout_probs_diff_max"]
    assert difference[1] < 1e-4 < difference[2]  # the rollout's log-probs are those of the tempered policy


def test_the_statistics_are_saved_and_used_after_a_resume(runs):
    first, resumed, saved = runs
    assert saved == {name: first[f"hapo/entropy_{name}"][2] for name in saved}
    assert not resumed["hapo/temperature_mean"].isna()[3]


def test_metrics_are_plausible(runs):
    _, table, _ = runs
    for step in (1, 2, 3):
        row = table.loc[step]
        assert row["hapo/high_entropy_share"] == pytest.approx(0.2, abs=0.02)
        assert 0.2 <= row["actor/hapo/clip_low"] <= 0.4 and 0.2 <= row["actor/hapo/clip_high"] <= 0.4
        assert 0 <= row["actor/hapo/redistributed"] <= 1 and 0 <= row["hapo/grpo_fallback_share"] <= 1
