"""The simulated trees: what they cost, what guides them, and what is learnt from them, against slow counts and hand
computations."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from studies import tabular_trees as trees
from studies.tabular_learning import (
    EXACT,
    LearntValue,
    Method,
    Updates,
    bounded,
    exact_guide,
    gradient_of,
    learn,
    softmax,
    values_of,
)
from studies.tabular_trees import ACTIONS, RIGHT, Drawing, N, Rows, Task
from studies.where_trees_pay import CONDITIONS, METHODS, WALK, Condition, first_logits

GROWERS = {
    "independent": trees.independent,
    "greedy": trees.greedy,
    "random forks": trees.random_forks,
    "entropy forks": trees.entropy_forks,
    "latr": lambda drawing: trees.latr(drawing, 0.05, 1.0, N),
    "latr, no branch": lambda drawing: trees.latr(drawing, 0.9, 1.0, N),
    "levels": lambda drawing: trees.levels(drawing, ends=trees.spread),
    "guided": lambda drawing: trees.levels(drawing, exact_guide(drawing)),
    "half guided": lambda drawing: trees.half_guided(drawing, exact_guide(drawing)),
}


def drawing_of(task: Task, prompts: int = 20, seed: int = 0) -> Drawing:
    rng = np.random.default_rng(seed)
    return Drawing(task, softmax(rng.standard_normal((prompts, task.length, task.n_seen, ACTIONS))), rng)


def decisions(rows: Rows, prompt: int) -> list[list[tuple[int, int]]]:
    """(node, action) of each row's decisions."""
    return [
        [(n, a) for n, a in zip(nodes, actions, strict=True) if a >= 0]
        for nodes, actions in zip(rows.nodes[prompt].tolist(), rows.actions[prompt].tolist(), strict=True)
    ]


@pytest.mark.parametrize("target", [None, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize("name", GROWERS)
def test_growers_draw_equally_many_decisions_and_make_trees(name, length, target):
    task = Task(length, target)
    rows = GROWERS[name](drawing_of(task))
    assert trees.generated(rows).tolist() == [N * length] * 20
    for prompt in range(20):
        paths = decisions(rows, prompt)
        assert len({node for path in paths for node, _ in path}) == N * length
        parents = {}
        for path in paths:
            for before, node in zip([None, *path], path, strict=False):
                assert parents.setdefault(node[0], (before, node)) == (before, node)
        prefixes = {tuple(a for _, a in path[: end + 1]) for path in paths for end in range(len(path))}
        assert trees.trained(rows)[prompt] == len(prefixes)
        for path, states in zip(paths, rows.states[prompt].tolist(), strict=True):
            actions = [action for _, action in path]
            state = sum(actions) if target is not None else int(any(a != RIGHT for a in actions))
            assert not path or states[len(path)] == state


@pytest.mark.parametrize("name", ["independent", "random forks", "entropy forks", "levels", "guided", "half guided"])
def test_with_one_decision_all_draw_independent_answers(name):
    task = Task(1)
    drawing = drawing_of(task, prompts=4000)
    rows = GROWERS[name](drawing)
    assert (rows.lengths == 1).sum(1).tolist() == [N] * 4000
    right = (rows.actions[..., 0] == RIGHT).sum(1)
    share = drawing.probs[:, 0, 0, RIGHT]
    assert right.mean() / N == pytest.approx(share.mean(), abs=0.01)
    # the variance of a binomial: the answers are independent
    assert ((right - N * share) ** 2).mean() == pytest.approx((N * share * (1 - share)).mean(), rel=0.1)


@pytest.mark.parametrize("name", ["random forks", "entropy forks", "levels"])
def test_without_a_guide_a_trees_answers_are_right_as_often_as_independent_ones(name):
    task = Task(3)
    drawing = drawing_of(task, prompts=4000)
    rows = GROWERS[name](drawing)
    right = ((rows.actions == RIGHT).all(-1)).sum(1) / (rows.lengths == 3).sum(1)
    assert right.mean() == pytest.approx(drawing.probs[:, :, 0, RIGHT].prod(1).mean(), abs=0.01)


def test_values_are_the_chances_of_all_answers():
    for task in (Task(3), Task(3, sees_errors=True), Task(3, target=4)):
        drawing = drawing_of(task, prompts=3)
        expected = np.zeros(3)
        for answer in product(range(ACTIONS), repeat=3):
            chance, total = np.ones(3), 0
            for at, action in enumerate(answer):
                seen = total if task.target is not None else int(task.sees_errors and total > 0)
                chance *= drawing.probs[:, at, seen, action]
                total += action
            right = total == task.target if task.target is not None else not any(answer)
            expected += chance * right
        np.testing.assert_allclose(values_of(task, drawing.probs)[:, 0, 0], expected)


def test_an_exact_value_drops_hopeless_prefixes_only():
    drawing = drawing_of(Task(6), prompts=200)
    rows = trees.levels(drawing, exact_guide(drawing))
    dropped = (rows.lengths > 0) & (rows.lengths < 6)
    wrong = ((rows.actions != RIGHT) & (rows.actions >= 0)).any(-1)
    assert dropped.any() and wrong[dropped].all()
    # where one prefix was right, no wrong one was continued
    for prompt in range(200):
        first_thirds = rows.actions[prompt, :, :2]
        if (first_thirds == RIGHT).all(-1).any():
            assert (first_thirds[rows.lengths[prompt] > 2] == RIGHT).all()


def test_stopped_answers_are_hopeless_and_cost_what_was_drawn():
    drawing = drawing_of(Task(6), prompts=200)
    rows = trees.stopped(drawing, exact_guide(drawing))
    cost = trees.generated(rows)
    assert (cost == rows.lengths.sum(1)).all() and (cost >= 48).all() and (cost < 54).all()
    stopped = (rows.lengths > 0) & (rows.lengths < 6)
    assert ((rows.actions != RIGHT) & (rows.actions >= 0)).any(-1)[stopped].all()


def test_latr_takes_the_most_likely_actions_and_opens_what_passes():
    # decision 1: 0.6 and 0.3; decision 2: 0.9 and 0.1; decision 3: 0.5 and 0.4
    probs = np.array([[0.6, 0.3, 0.1, 0], [0.9, 0.1, 0, 0], [0.5, 0.4, 0.1, 0]])[None, :, None]
    drawing = Drawing(Task(3), probs, np.random.default_rng(0))
    rows = trees.latr(drawing, absolute=0.2, relative=0.5, branches=N)
    assert rows.actions[0, :4].tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 1], [1, 0, 1]]
    # 2 + 2 + 4 decisions in the tree, 16 for ordinary answers: 5 of them, and one decision
    assert (rows.lengths[0] > 0).sum() == 4 + 6


def test_latr_draws_once_its_branches_are_full():
    probs = np.tile([0.5, 0.5, 0.0, 0.0], (500, 6, 1, 1)) + 1e-12
    rows = trees.latr(Drawing(Task(6), probs, np.random.default_rng(0)), 0.25, 0.5, branches=2)
    assert (rows.actions[:, 0, 0] == 0).all() and (rows.actions[:, 1, 0] == 1).all()
    assert rows.actions[:, :2, 1:].mean() == pytest.approx(0.5, abs=0.05)


def test_learnt_value_is_the_share_of_right_answers():
    value = LearntValue(Task(2), prompts=2, shared_by=1)
    together = LearntValue(Task(2), prompts=2, shared_by=2)
    actions = np.array([[[0, 0], [1, 0], [0, 2]], [[3, 0], [3, 0], [3, 1]]])
    rows = Rows(actions, actions, np.zeros((2, 3, 3), int))
    for learner in (value, together):
        learner.update(rows, np.array([[True, False, True], [False, False, False]]))
    # 2 of 3 were right; after action 0: (2 + 4 * 2/3) / (2 + 4); after 1: (0 + 4 * 2/3) / (1 + 4)
    np.testing.assert_allclose(value.guide(rows, 1)[0], [1, (8 / 15) / (7 / 9), 1])
    np.testing.assert_allclose(value.guide(rows, 1)[1], 1)  # nothing was right: no difference
    # together 2 of 6; after 0: (2 + 4/3) / 6; after 3: (0 + 4/3) / 7
    np.testing.assert_allclose(together.guide(rows, 1)[1], (4 / 21) / (5 / 9))


def test_gradient_of_independent_answers_is_that_of_the_loss():
    torch = pytest.importorskip("torch")
    task = Task(3)
    drawing = drawing_of(task, prompts=5)
    rows = trees.independent(drawing)
    outcomes = np.random.default_rng(1).random((5, N)) < 0.4
    scores = torch.from_numpy(outcomes).double()
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    logits = torch.from_numpy(np.log(drawing.probs)).requires_grad_()
    log_probs = logits.log_softmax(-1)[:, None, :, 0].expand(5, N, 3, ACTIONS)
    chosen = log_probs.gather(-1, torch.from_numpy(rows.actions)[..., None])[..., 0]
    (expected,) = torch.autograd.grad((advantages[..., None] * chosen).sum() / N, logits)
    gradient = gradient_of(drawing, rows, outcomes, np.ones((5, N), bool), "grpo_vectorized")
    np.testing.assert_allclose(gradient, expected.numpy(), atol=1e-5)


def test_updates_wait_until_all_prompts_of_a_set_differ():
    updates = Updates((4, 1), sets=2, most_rounds=3)
    gradient = np.array([[1.0], [2.0], [3.0], [4.0]])
    assert updates.add(gradient, np.array([True, True, True, False])).tolist() == [True, True, True, False]
    assert updates.take().ravel().tolist() == [1, 2, 0, 0]
    assert updates.waits.tolist() == [True, True, False, True]
    updates.add(10 * gradient, np.array([False, False, True, True]))
    assert updates.take().ravel().tolist() == [0, 0, 3, 40]


def test_bounded_keeps_the_direction():
    change = np.array([[1.0, -4.0], [0.5, 0.1]])
    np.testing.assert_allclose(bounded(change, 2.0), [[0.5, -2.0], [0.5, 0.1]])


def test_independent_answers_learn_and_cost_what_they_should():
    condition = next(c for c in CONDITIONS if c.length == 3)
    first = np.stack([first_logits(condition, 8, seed) for seed in range(2)])
    curves = learn(condition.task, METHODS[0], "grpo_vectorized", np.array([2.0, 0.0]), first, 0, 20, 0.0)
    assert curves.generated[-1].tolist() == [20 * N * 3] * 2
    assert curves.accuracy[-1, 0] > 2 * curves.accuracy[0, 0]
    assert curves.accuracy[-1, 1] == pytest.approx(curves.accuracy[0, 1])
    ends = np.array([20.0 * N * 3] * 2)
    assert curves.area("generated", ends)[1] == pytest.approx(curves.accuracy[0, 1])


def test_a_guided_search_that_hides_its_errors_stops_learning():
    """Where all kept prefixes are right, what chose them has no credit, unless dropped ones are trained, too."""
    task, first = Task(3), np.zeros((1, 64, 3, 1, ACTIONS))

    def last(trains_dropped: bool) -> float:
        method = Method("", trees.levels, value=EXACT, trains_dropped=trains_dropped)
        return learn(task, method, "grpo_vectorized", np.array([2.0]), first, 0, 60, 0.0).accuracy[-1, 0]

    assert last(True) > 0.8 > 0.5 > last(False)


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_first_policies_are_right_as_often_as_named(condition: Condition):
    probs = softmax(first_logits(condition, 500, 0))
    accuracy = values_of(condition.task, probs)[:, 0, 0]
    if condition.shape == WALK:
        assert accuracy.mean() == pytest.approx(condition.accuracy, rel=0.2)
    else:
        np.testing.assert_allclose(accuracy, condition.accuracy)


def test_methods_have_names_of_their_own():
    assert max(Counter(method.name for method in METHODS).values()) == 1
