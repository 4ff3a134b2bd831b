"""HATO on the real stack, three launches of about two minutes: useless trees are replaced, in a run that is killed and
goes on; Reptile moves the weights, on two nodes.
"""

import pandas as pd
import pytest
import torch

from recipe.common.reporting.run_metrics import load_metrics
from tests.e2e.runs import (
    HATO,
    NO_VALIDATION,
    PARITY_REWARD,
    finish_run,
    kill,
    logged_steps,
    start_run,
    trees_of,
    wait_until,
)
from verl.trainer.checkpoint_marker import complete_steps

SETTINGS = [*NO_VALIDATION, "trainer.tree_freq=1", "trainer.tree_prompts=4", PARITY_REWARD]
pytestmark = pytest.mark.e2e


FILTERED = [
    "credit=hato",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "algorithm.filter_groups.enable=true",
    "hato.local_reward=reward_loop",
    "hato.exploration.nodes_per_tree=10",
    "hato.tree.max_nodes=12",
    "hato.exploration.temperature_decay=1.0",
    "hato.uncertainty.method=bootstrap",
]


@pytest.fixture(scope="module")
def killed(inputs):
    """The run's folder, and the step of its checkpoint when its engine got SIGKILL."""
    run = inputs / "filtered"
    launcher = start_run(inputs, "filtered", *SETTINGS, *FILTERED, script=HATO)
    # a step is logged after its checkpoint: killed in between, it would be missing in the curves
    wait_until(lambda: bool(complete_steps(run) and logged_steps(run)), launcher)
    end = kill(launcher, "EngineCore")
    assert end.code != 0 and "resumes" in end.errors and end.left == []
    return run, complete_steps(run)[-1]


@pytest.fixture(scope="module")
def filtered(inputs, killed):
    """The same command again."""
    assert killed[1] < 3, "it was killed too late"
    return finish_run(inputs, "filtered", *SETTINGS, *FILTERED, script=HATO)


def state_of(run, step: int) -> dict:
    return torch.load(run / f"global_step_{step}/hato.pt", weights_only=True)


def test_a_checkpoint_restores_the_searchs_memory_and_record(filtered, killed):
    """A bootstrap is its memory: the last one begins with the steps that were remembered at the kill."""
    _, at = killed
    before, after = (state_of(filtered, step)["value_model"]["memory"] for step in (at, 3))
    n = len(before["outcomes"])
    assert 0 < n < len(after["outcomes"])
    for name in ("features", "outcomes", "weights"):
        assert torch.equal(after[name][:n], before[name])
    records = [state_of(filtered, step)["record"] for step in (at, 3)]
    assert records[0].keys() <= records[1].keys()
    assert sum(n_steps for n_steps, _ in records[1].values()) == len(after["outcomes"])


def test_trees_that_say_nothing_are_replaced_and_still_teach_the_value_model(filtered):
    table = load_metrics(filtered)
    assert list(table["hato/trees_kept"].dropna().index) == [1, 2, 3] and (table["hato/trees_kept"] == 4).all()
    dropped = table["hato/trees_dropped"]
    assert dropped.sum() > 0
    generated = table["training/filter_groups/gen_batches"]
    surplus = table["training/filter_groups/discarded_surplus_samples"]
    assert list(generated) == list(1 + (dropped + surplus) / 4) and surplus.mean() <= 4
    # more steps than the kept trees have, those before the kill included
    kept = table["tree/nodes_kept"].sum() * 4
    assert len(state_of(filtered, 3)["value_model"]["memory"]["outcomes"]) > kept


@pytest.mark.parametrize("step", [1, 2, 3])
def test_trees_rewards_and_advantages(filtered, step):
    table, records = load_metrics(filtered), trees_of(filtered, step)
    assert len(records) == 4
    for record in records:
        assert len(set(record["rewards"])) == 2, "only trees with right and wrong answers are trained on"
        assert len(record["segments"]) <= 12, "hato.tree.max_nodes, and none is pruned"
        by_parent: dict = {}
        for segment in record["segments"]:
            info = segment["info"]
            assert info["R_local"] == 0.25, "the reward loop was asked"
            assert info["R_total"] == pytest.approx(0.1 * 0.25 + 0.7 * info["R_path"] + 0.2 * info["R_causal"])
            by_parent.setdefault(segment["parent"], []).append(info)
        for parent, siblings in by_parent.items():
            total = sum(info["advantage"] for info in siblings)
            if len(siblings) > 1:
                assert total == pytest.approx(0, abs=1e-4)
            else:  # a chain is one step
                above = 0 if parent is None else record["segments"][parent]["info"]["advantage"]
                assert total == pytest.approx(above, abs=1e-6)
    assert any(info["advantage"] for info in (s["info"] for r in records for s in r["segments"]))
    assert table["hato/temperature"][step] == pytest.approx([1.0, 0.7165, 0.5134][step - 1], abs=1e-3)
    # the policy that the loss sees is the one that was sampled, at each step's temperature
    assert table["training/rollout_probs_diff_max"][step] < 1e-4


@pytest.fixture(scope="module")
def adapted(inputs, two_nodes):
    file = inputs / "train.parquet"
    rows = pd.read_parquet(file)
    rows["data_source"] = ["even" if target["target"] % 2 == 0 else "odd" for target in truths(rows)]
    rows.to_parquet(file)
    meta = [f"hato.meta_learning.{setting}" for setting in ("enable=true", "n_inner_steps=2", "meta_lr=0.5")]
    length = ["trainer.total_training_steps=4", "trainer.save_freq=4"]
    settings = [*SETTINGS, *meta, *length, "trainer.nnodes=2"]
    return finish_run(inputs, "adapted", *settings, script=HATO, **two_nodes)


def truths(rows: pd.DataFrame) -> list[dict]:
    return [row["ground_truth"] for row in rows["reward_model"]]


def test_reptile_moves_the_weights_and_they_reach_the_rollout(adapted):
    table = load_metrics(adapted)
    assert list(table.index[table["meta/inner_distance"].notna()]) == [2, 4]
    assert (table["meta/inner_distance"].dropna() > 1e-3).all()
    # step 3 samples with the interpolated weights, and the actor computes the same probabilities with its own
    assert (table["training/rollout_probs_diff_max"] < 1e-4).all()


def test_an_episode_sees_one_domain(adapted, inputs):
    rows = pd.read_parquet(inputs / "train.parquet")
    domain_of = {row["prompt"][0]["content"]: row["data_source"] for _, row in rows.iterrows()}
    seen = []
    for step in (1, 2, 3, 4):
        questions = [record["prompt"].split("user\n")[1].split("<")[0] for record in trees_of(adapted, step)]
        domains = {domain_of[question] for question in questions}
        assert len(domains) == 1
        seen += domains
    assert seen[0] == seen[1] and seen[2] == seen[3]
