"""A combination that no paper has, on the real stack: LATR's trees, HAPO's sampler and loss, credit by gain.

One launch of about two minutes.
"""

import pytest

from recipe.common.run_metrics import load_metrics
from tests.e2e.runs import ROOT, start_run

KT = "actor_rollout_ref.rollout.kt"
PARTS = ["tree=latr", "sampler=tempered", "credit=tree_gain", "loss=hapo"]
SETTINGS = ["trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=-1"]
SETTINGS += ["trainer.val_before_train=false", "actor_rollout_ref.rollout.temperature_tau=0.3"]
# an untrained model is nearly uniform: let every second candidate open a branch; one response of four is sampled
SETTINGS += [
    f"{KT}.prob_filter_abs_thres=0.0",
    f"{KT}.prob_filter_rel_thres=1.0",
    f"+{KT}.mix_ratio_schedule={{0: 0.75}}",
]
SETTINGS += [f"{KT}.rollout_filter_steps=[3,5]", f"{KT}.chunk_size=12"]
SETTINGS += [f"reward.custom_reward_function.path={ROOT}/tests/e2e/parity_reward.py"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def table(inputs):
    launcher = start_run(inputs, "explore", *PARTS, *SETTINGS, script="recipe/common/run_explore.sh")
    _, errors = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, errors
    assert (inputs / "explore/global_step_2/hapo.json").exists() and (inputs / "explore/global_step_2/kt.json").exists()
    return load_metrics(inputs / "explore")


def test_trees_share_tokens_and_the_credit_knows(table):
    assert (table["tree/branches"] > 1).all()
    assert (table["credit/shared_tokens"].dropna() > 0).all() and (table["credit/hard_minus_soft"].dropna() > 0).any()


def test_the_sampler_is_tempered_from_the_second_step_on(table):
    tempered, difference = table["hapo/temperature_mean"], table["training/rollout_probs_diff_max"]
    assert tempered.isna()[1] and tempered[2] != 1.0
    assert difference[1] < 1e-4 < difference[2]  # the rollout's log-probs are those of the tempered policy


def test_the_loss_is_hapos_and_moves_the_policy(table):
    for step in (1, 2):
        assert 0.2 <= table["actor/hapo/clip_low"][step] <= 0.4 and 0 <= table["actor/hapo/redistributed"][step] <= 1
        assert table["actor/grad_norm"][step] > 0
