"""The same batches give the same numbers on one worker and on two.

On one: LATR's recipe with the trivial group rollout (over-generation by a factor of 1: n independent samples). On two:
HAPO's with every mechanism off and upstream's agent loops, one trajectory at a time. So a trivial group rollout
is upstream's agent loop, HAPO with all off is upstream's loss, and the number of workers does not matter.

Two launches of about 100 s each. Sampling is greedy (`rollout.top_k=1`, n=1), so that both train on the same batches,
however prompts are dealt to the replicas.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recipe.common.reporting.run_metrics import load_metrics
from tests.e2e.runs import HAPO, LATR, NO_VALIDATION, finish_run

STEPS = 3
GREEDY = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", *NO_VALIDATION]
GREEDY += ["actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.top_k=1"]
GREEDY += ["trainer.save_freq=-1", f"trainer.total_training_steps={STEPS}"]
GREEDY += [f"reward.custom_reward_function.path={Path(__file__).with_name('target_reward.py')}"]
# with one response of a prompt, group-relative estimators say nothing
GREEDY += ["algorithm.adv_estimator=reinforce_plus_plus"]
ALL_OFF = ["algorithm.filter_groups.enable=false"]
ALL_OFF += ["actor_rollout_ref.actor.adaptive_clip=false", "actor_rollout_ref.actor.adaptive_advantage=false"]
ALL_OFF += ["actor_rollout_ref.rollout.adaptive_temperature=false", "actor_rollout_ref.rollout.tree=null"]
ALL_OFF += ["actor_rollout_ref.rollout.agent.agent_loop_manager_class=null"]
ALL_OFF += ["reward.reward_kwargs.overlong_buffer_cfg.enable=false"]
TRIVIAL_GROUP = ["actor_rollout_ref.rollout.name=over_generation"]
TRIVIAL_GROUP += ["actor_rollout_ref.rollout.kt.over_generation_factor=1.0"]
COMPARED = ("actor/grad_norm", "actor/entropy", "critic/score/mean", "response_length/mean")
pytestmark = pytest.mark.e2e


def metrics_of(inputs: Path, script: str, workers: int, overrides: list[str]) -> pd.DataFrame:
    name = f"{Path(script).parent.name}{workers}"
    settings = [*GREEDY, *overrides, f"trainer.n_gpus_per_node={workers}"]
    return load_metrics(finish_run(inputs, name, *settings, script=script)).loc[1:STEPS]


def test_hapo_off_on_two_workers_computes_what_grpo_with_trivial_groups_computes_on_one(inputs):
    """float32 sums in another order: equal to 1e-4 relative."""
    one = metrics_of(inputs, LATR, 1, TRIVIAL_GROUP)
    two = metrics_of(inputs, HAPO, 2, ALL_OFF)
    for name in COMPARED:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, err_msg=name)
    # advantages that are centered over the batch: the first update's loss is 0, its gradient is not
    assert (one["actor/grad_norm"] > 1e-3).all() and one["actor/pg_loss"].abs().max() < 1e-5
