"""ARPO's trees of a program that calls the policy by OpenAI's client: branches are second runs of it, and what it
rewrites is trained as sequences of its own. One launch of about a minute.
"""

import pytest

from recipe.common.reporting.run_metrics import load_metrics
from tests.e2e.runs import NO_VALIDATION, finish_run, trees_of

ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS = ["tree=arpo", "environment=agent", "update=tree", "environment.replay=true", "environment.reward=result"]
SETTINGS += ["environment.class_path=tests.workers.rollout.agent.agents.three_turns", "environment.timeout=60"]
SETTINGS += ["trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.tree_freq=1", *NO_VALIDATION]
SETTINGS += ["data.max_prompt_length=80", "data.max_response_length=120"]
SETTINGS += [f"{ROLLOUT}.initial_rollouts=2", f"{ROLLOUT}.branch_probability=1.0", f"{ROLLOUT}.entropy_tokens=1"]
pytestmark = pytest.mark.e2e


def test_a_program_grows_trees_and_is_trained(inputs):
    run = finish_run(inputs, "agent", *SETTINGS, script="recipe/common/run_explore.sh")
    table = load_metrics(run).loc[1:]
    assert (table["tree/forks"] > 0).all() and (table["environment/replays"] > 0).all()
    assert (table["environment/replay_differs"] == 0).all() and (table["environment/failures"] == 0).all()
    assert (table["environment/agent_continued"] > 0).all() and (table["environment/agent_rewritten"] > 0).all()
    assert (table["tree/rows_per_rollout"] == 2).all() and (table["actor/grad_norm"] > 0).all()
    assert table["training/rollout_probs_diff_max"].max() < 1e-4, "the update reads what the rollout has read"
    assert table["critic/rewards/mean"].between(0.01, 0.99).all()
    segments = [segment for record in trees_of(run, 1) for segment in record["segments"]]
    assert any("context_tokens" in segment["info"] for segment in segments)
