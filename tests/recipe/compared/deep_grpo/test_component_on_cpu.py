"""What DEEP-GRPO's pivots become of is learnt in the order of the data, sent with the next prompts, and kept."""

import math
import pickle

import numpy as np
import pytest
import torch
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from recipe.compared.deep_grpo.component import PivotSuccess, fit_success
from recipe.compared.deep_grpo.tree import PIVOTS, Fit, Pivots, pivot_weights
from tests.trainer.ppo.toy_step import ROLLOUT, MemoryQueue, trainer_of
from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.workers.rollout.trajectory_tree import TREE_DATA

# of each prompt: x of its pivots, and its rows: reward and pivot. p: a right and a wrong branch, then two wrong ones
# (main trajectories that are right do not count); q has no pivot
PROMPTS = {
    "p": ([0.25, 0.75], [(1.0, 0), (0.0, 0), (0.0, 1), (1.0, 1), (0.0, 2), (0.0, 2)]),
    "q": ([], [(1.0, 0)] * 6),
    "r": ([0.5], [(1.0, 0)] * 4 + [(0.0, 1), (0.5, 1)]),
}
KEYS = {"chains": 2, "max_failures": 2, "branches": 2}


def trainer(**values):
    made = {f"{ROLLOUT}.tree": "deep_grpo", f"{ROLLOUT}.n": 6, "algorithm.adv_estimator": "grpo"}
    return trainer_of(made | {f"{ROLLOUT}.custom.deep_grpo": KEYS | values.pop("keys", {})} | values)


def component(made) -> PivotSuccess:
    return next(own for own in made.components if isinstance(own, PivotSuccess))


@pytest.fixture
def queue(monkeypatch):
    queue = MemoryQueue(monkeypatch)
    for order, (uid, (positions, rows)) in enumerate(PROMPTS.items()):
        for i, (reward, pivot) in enumerate(rows):
            extra = {TREE_DATA: pickle.dumps(Pivots(positions))} if i == 0 else {}
            columns = {PIVOTS.name: [0, pivot, pivot], "extra_fields": extra}
            queue.add(f"{uid}_{i}_0", reward, [1, 1, 1], order, **columns)
    return queue


def fit_of(made) -> Fit | None:
    return component(made).step_settings(made).tree_record(Fit)


def test_outcomes_of_kept_and_dropped_prompts_in_the_order_of_the_data(queue):
    made, metrics = trainer(), {}
    own = component(made)
    own.on_drop(BatchRows(queue.batch("p")))
    for key in [key for key in queue.rows if key.startswith("p")]:
        del queue.rows[key]
    made._compute_advantage(queue.batch(), metrics)
    assert list(own.pivots) == [(0.25, True), (0.75, False), (0.5, True)]
    assert metrics["deep_grpo/pivots"] == 3
    assert metrics["deep_grpo/pivot_position"] == 0.5 and metrics["deep_grpo/pivot_success"] == pytest.approx(2 / 3)
    assert "deep_grpo/success_slope" not in metrics and fit_of(made) is None
    assert own.dropped == []


def test_a_threshold_says_what_is_right(queue):
    made = trainer(keys={"failure_threshold": 0.5})
    made._compute_advantage(queue.batch(), {})
    assert list(component(made).pivots) == [(0.25, True), (0.75, False), (0.5, False)]


def test_the_fit_reaches_the_rollout_once_there_are_enough_pivots(queue):
    made, metrics = trainer(), {}
    for _ in range(3):
        made._compute_advantage(queue.batch(), {})
    assert fit_of(made) is None, "9 pivots"
    made._compute_advantage(queue.batch(), metrics)
    intercept, slope = fit_of(made)
    assert (metrics["deep_grpo/success_intercept"], metrics["deep_grpo/success_slope"]) == (intercept, slope)
    assert slope < 0, "late branches failed"
    later, earlier = pivot_weights(4, 0.0, (intercept, slope))[2], pivot_weights(4, 0.0, None)[2]
    assert later < earlier == 1.0


def test_the_window_bounds_what_is_kept(queue):
    made = trainer(keys={"window": 4})
    for _ in range(3):
        made._compute_advantage(queue.batch(), {})
    assert list(component(made).pivots) == [(0.5, True), (0.25, True), (0.75, False), (0.5, True)]


def test_it_comes_back_with_the_checkpoint(queue, monkeypatch, tmp_path):
    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", 7))
    saved, loaded = (trainer(**{"trainer.default_local_dir": str(tmp_path)}) for _ in range(2))
    for _ in range(5):
        saved._compute_advantage(queue.batch(), {})
    saved.global_steps = 7
    saved._save_checkpoint()
    assert [path.name for path in (tmp_path / "global_step_7").iterdir()] == ["deep_grpo.json"]
    loaded._load_checkpoint()
    assert fit_of(loaded) == fit_of(saved) is not None
    for made in (saved, loaded):
        made._compute_advantage(queue.batch(), {})
    assert component(loaded).pivots == component(saved).pivots and fit_of(loaded) == fit_of(saved)


# ---- the regression ----


def penalized_loss(fit, positions, right) -> torch.Tensor:
    odds = fit[0] + fit[1] * torch.tensor(positions, dtype=torch.double)
    targets = torch.tensor(right, dtype=torch.double)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(odds, targets, reduction="sum")
    return loss + fit[1] ** 2 / 2


@pytest.mark.parametrize(
    ("n", "intercept", "slope"), [(11, 0.0, 0.0), (200, 1.0, -3.0), (3000, -4.0, 2.0), (10_000, -7.0, 0.5)]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_fit_is_where_the_loss_is_smallest(n, intercept, slope, seed):
    draws = np.random.default_rng(seed)
    positions = draws.random(n).round(2)
    right = draws.random(n) < 1 / (1 + np.exp(-(intercept + slope * positions)))
    right[0], right[1] = True, False
    fit = torch.tensor(fit_success(zip(positions, right, strict=True)), dtype=torch.double, requires_grad=True)
    penalized_loss(fit, positions, right).backward()
    assert fit.grad.abs().max() < 1e-6 * n, "the loss is convex, so that this is the only minimum"


def test_outcomes_that_a_position_separates_and_equal_positions_have_a_finite_fit():
    separated = fit_success([(0.2, False)] * 50 + [(0.8, True)] * 50)
    assert 0 < separated[1] < 100 and abs(separated[0] + separated[1] / 2) < 1e-6
    equal = fit_success([(0.5, True)] * 30 + [(0.5, False)] * 10)
    assert 1 / (1 + math.exp(-equal[0] - equal[1] / 2)) == pytest.approx(0.75)
    rare = fit_success([(i / 10_000, i == 0) for i in range(10_000)])
    assert all(map(math.isfinite, rare))


def test_few_pivots_or_one_outcome_have_none():
    assert fit_success([]) is None
    assert fit_success([(0.5, i == 0) for i in range(10)]) is None
    assert fit_success([(0.5, True)] * 100) is None
    assert fit_success([(0.5, i == 0) for i in range(11)]) is not None
