"""DEEP-GRPO: branches of failed trajectories, advantages against the paper's sum, and what pivots teach."""

import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from recipe.compared.deep_grpo.component import PivotSuccess, fit_success
from recipe.compared.deep_grpo.tree import PIVOTS, DeepGRPOKeys, Fit, Pivots, Policy, pivot_weights
from tests.recipe.compared.engines import Script, grown_by, letter, odd, scoring
from tests.trainer.ppo.toy_step import ROLLOUT, MemoryQueue, trainer_of
from tests.workers.rollout.toy_engine import EOS, HashEngine, Letters
from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.workers.rollout.prompt_task import PromptSettings, PromptTask
from verl.workers.rollout.trajectory_tree import TREE_DATA
from verl.workers.rollout.tree_rollout import rows_of

# prompt -> its pivots' numbers and x, and rows (reward, number of the pivot or 0). p: a right and a wrong branch at the
# first pivot, two wrong ones at the second (right main trajectories do not count); q has no pivot; r has lost its first
PROMPTS = {
    "p": ({1: 0.25, 2: 0.75}, [(1.0, 0), (0.0, 0), (0.0, 1), (1.0, 1), (0.0, 2), (0.0, 2)]),
    "q": ({}, [(1.0, 0)] * 6),
    "r": ({2: 0.5}, [(1.0, 0)] * 4 + [(0.0, 2), (0.5, 2)]),
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
            extra = {TREE_DATA: pickle.dumps(Pivots(tuple(positions.items())))} if i == 0 else {}
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


def test_a_threshold_says_what_is_right_and_the_window_bounds_what_is_kept(queue):
    made = trainer(keys={"failure_threshold": 0.5, "window": 4})
    made._compute_advantage(queue.batch(), {})
    assert list(component(made).pivots) == [(0.25, True), (0.75, False), (0.5, False)]
    made._compute_advantage(queue.batch(), {})
    assert list(component(made).pivots) == [(0.5, False), (0.25, True), (0.75, False), (0.5, False)]


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


def test_pivots_and_fit_come_back_with_the_checkpoint(queue, monkeypatch, tmp_path):
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


def grown(engine, reward_of=odd, fit=None, seed=0, **keys):
    """The tree, its rows, the policy, and the trajectories that were scored."""
    keys = DeepGRPOKeys(**{"chains": 4, "branches": 3, "step_delimiter": "c", "max_step_tokens": 6} | keys)
    score, scored = scoring(reward_of)
    task = PromptTask({}, settings=PromptSettings(tree=(Fit(*fit),) if fit else ()))
    policy = Policy(keys, letter).for_task(task)
    tree = grown_by(policy, engine, keys.chains + keys.max_failures * keys.branches, score=score, seed=seed)
    return tree, rows_of(tree, policy), policy, scored


def ends_of_steps(text, most=6):
    """Lengths at which a step ends, the last one's included, letter by letter."""
    ends, begun = [], 0
    for at in range(1, len(text) + 1):
        if text[at - 1] == "c" or at - begun == most or at == len(text):
            ends.append(at)
            begun = at
    return ends


@pytest.mark.parametrize("seed", range(8))
def test_branches_go_on_from_a_step_of_a_failed_trajectory(seed):
    engine = HashEngine(sharpness=1.5, memory=100)
    tree, rows, policy, scored = grown(engine, seed=seed)
    responses = [row.response_ids for row in rows]
    pivots = [row.token_fields[PIVOTS.name] for row in rows]
    assert scored == responses[:4]
    failed = [tokens for tokens in scored if not odd(tokens)]
    assert tree.metrics["failed_chains"] == len(failed)
    n_pivots = min(2, len(failed))
    positions = policy.data_for_trainer(tree).positions
    assert len(positions) == n_pivots
    assert all(set(row) == {0} for row in pivots[: 10 - 3 * n_pivots]), "the others are main trajectories"
    for number in range(1, n_pivots + 1):
        chain = failed[number - 1]
        nodes = [0, *ends_of_steps(Letters().decode(chain))]
        first = 10 - 3 * n_pivots + 3 * (number - 1)
        for response, row_pivots in list(zip(responses, pivots, strict=True))[first : first + 3]:
            forked = row_pivots.index(number)
            assert row_pivots == [0] * forked + [number] * (len(response) - forked)
            assert response[:forked] == chain[:forked] and forked in nodes[:-1]
            assert dict(positions)[number] == (nodes.index(forked) + 1) / len(nodes)
    assert len(engine.asked) == 10 and len({request.seed for request in engine.asked}) == 10


def test_a_threshold_says_what_has_failed():
    """The warm start's reward for a wrong answer in the right format is above 0."""
    for threshold, failed in ((0.0, 0), (0.1, 4)):
        tree, *_ = grown(HashEngine(), lambda tokens: 0.1, failure_threshold=threshold)
        assert tree.metrics["failed_chains"] == failed


def test_the_weights_by_hand():
    """Four nodes, of which the last one is no pivot, gamma 2 and P 1: 1/14, 4/14, 9/14."""
    weights = pivot_weights(4, 2.0, None)
    assert [weight / sum(weights) for weight in weights] == pytest.approx([1 / 14, 4 / 14, 9 / 14])
    fitted = pivot_weights(4, 1.0, (0.5, -3.0))
    expected = [x / (1 + math.exp(-(0.5 - 3.0 * x))) for x in (0.25, 0.5, 0.75)]
    assert fitted == pytest.approx(expected)
    assert pivot_weights(2, 2.0, None) == [0.25], "the only step is no pivot, the prompt is"


@pytest.mark.parametrize("fit", [None, (1.0, -6.0)])
def test_pivots_are_drawn_by_these_weights(fit):
    """Three steps, of 1, 3 and 2 tokens, after the prompt."""
    n = 2000
    script = Script([2, 0, 1, 2, 5, EOS])
    _, rows, _, _ = grown(script, lambda tokens: 0.0, fit=fit, chains=n, max_failures=n, branches=1)
    drawn = Counter(row.token_fields[PIVOTS.name].count(0) for row in rows[n:])
    weights = dict(zip((0, 1, 4), pivot_weights(4, 2.0, fit), strict=True))
    assert drawn.keys() == weights.keys()
    for forked, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(drawn[forked] / n - share) < 4 * math.sqrt(share / n)


def test_branches_that_begin_as_the_failed_trajectory_did_are_nodes_of_their_own():
    tree, rows, _, _ = grown(Script([1, 2, 4, 2, EOS]), lambda tokens: 0.0)
    assert {tuple(row.response_ids) for row in rows} == {(1, 2, 4, 2, EOS)}
    ends = [row.token_fields["segment_ids"][-1] for row in rows]
    assert len(set(ends)) == len(rows)


def advantage(scores, pivots, mask, index, **keys) -> torch.Tensor:
    """(B, T); `scores` of rows, the rest of tokens."""
    pivots, mask = torch.tensor(pivots), torch.tensor(mask, dtype=torch.float)
    rewards = torch.zeros(mask.shape)
    rewards[:, -1] = torch.tensor(scores, dtype=torch.float)
    config = OmegaConf.create({"deep_grpo": keys})
    with PIVOTS.bound(pivots):
        return get_adv_estimator_fn("deep_grpo")(rewards, mask, np.array(index, dtype=object), config=config)[0]


@pytest.mark.parametrize("branch_weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_token_mean_is_the_papers_loss(seed, branch_weight):
    """Rows of three prompts with up to two pivots, tool tokens, and a loss that is any number for each token."""
    draws = np.random.default_rng(seed)
    n, width = 40, 9
    index, row_pivot = draws.integers(0, 3, n), draws.integers(0, 3, n)
    forked = draws.integers(0, width - 1, n)
    pivots = [[int(row_pivot[i] * (t >= forked[i])) for t in range(width)] for i in range(n)]
    mask, scores, losses = draws.random((n, width)) < 0.7, draws.random(n), torch.tensor(draws.normal(size=(n, width)))
    result = advantage(scores, pivots, mask, index, branch_weight=branch_weight)
    assert (result[torch.tensor(~mask)] == 0).all()
    means = {False: [], True: []}
    for i in range(n):
        rivals = [scores[j] for j in range(n) if index[j] == index[i] and row_pivot[j] == row_pivot[i]]
        for t in range(width):
            own = row_pivot[i] == 0 or t >= forked[i]
            if mask[i, t] and own:
                means[row_pivot[i] > 0].append((scores[i] - sum(rivals) / len(rivals)) * losses[i, t].item())
    expected = np.mean(means[False]) + branch_weight * np.mean(means[True])
    assert (result * losses)[torch.tensor(mask)].mean().item() == pytest.approx(expected, abs=1e-6)
