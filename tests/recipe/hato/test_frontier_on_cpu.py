"""Merging, pruning and releasing steps; a step with a tool's result is a step like others."""

from collections import Counter

import pytest

from recipe.hato.frontier import ROOT, Frontier
from recipe.hato.keys import DRAWS
from tests.recipe.hato.trees import frontier, grown, model, random_frontier, tool
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS, MODEL, TOOL, TrajectoryTree
from verl.workers.rollout.tree_builder import Path


def test_identical_siblings_are_one_step_that_counts():
    tree = frontier()
    first = tree.add(ROOT, [model(5, 6)], ended=False, value=0.3)
    assert tree.add(ROOT, [model(5, 6)], ended=False, value=0.9) == first
    other = tree.add(ROOT, [model(5, 7)], ended=True)
    assert tree.add(first, [model(5, 6)], ended=True) not in (first, other)  # equal tokens, another parent
    assert [segment.info.fields[DRAWS.name] for segment in tree.tree.segments] == [2, 1, 1]
    assert (tree.n_kept, tree.steps[first].value, tree.steps[ROOT].children) == (3, 0.3, [1, 2])
    assert len(tree.tree.segments) == 3


def test_a_step_with_a_result_goes_on_after_it():
    tree = frontier()
    call = tree.add(ROOT, [model(5, 6), tool(90, 91, 92)], ended=False)
    end = tree.add(call, [model(7), tool(93), model(8)], ended=True)
    assert tree.path(call) == Path((5, 6, 90, 91, 92), ((2, 5),))
    assert tree.path(end) == Path((5, 6, 90, 91, 92, 7, 93, 8), ((2, 5), (6, 7)))
    assert (tree.written(ROOT), tree.written(call), tree.written(end)) == ([100, 101], [5, 6], [7, 8])
    assert tree.path_log_probs(end) == [-1.0] * 4
    assert [segment.parent for segment in tree.tree.segments] == [None, 0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_kept_steps_have_a_leaf_below_and_paths_are_the_trajectories(seed):
    tree = random_frontier(seed)
    on_paths = set()
    for number in tree.leaves():
        while number != ROOT:
            on_paths.add(number)
            number = tree.steps[number].parent
    assert on_paths == {i for i in range(1, len(tree.steps)) if tree.is_kept(i)}
    assert tree.n_kept == len(on_paths) and tree.n_leaves == len(tree.leaves()) and not tree.open_steps()
    for number, step in enumerate(tree.steps):
        segments = [tree.tree.segments[i] for i in step.segments]
        assert all(bool(segment.token_ids) == (number in on_paths) for segment in segments)
    assert set(tree._same.values()) == on_paths, "what is dropped is not held for comparison either"
    shared = tree.tree
    shared.leaves = [tree.steps[leaf].segments[-1] for leaf in tree.leaves()]
    assert shared.trajectories() == [list(tree.path(leaf).tokens) for leaf in tree.leaves()]
    for row, mask, log_probs, leaf in zip(
        shared.trajectories(), shared.response_masks(), shared.log_probs(), tree.leaves(), strict=True
    ):
        assert tree.path_log_probs(leaf) == [p for p, by_model in zip(log_probs, mask, strict=True) if by_model]
        path = tree.path(leaf)
        assert path.calls == row.count(50) and not any(token == 50 for token in row[path.turn :])
    kept = {i for number, step in enumerate(tree.steps) if tree.is_kept(number) for i in step.segments}
    assert kept == {i for leaf in shared.leaves for i in shared.path(leaf)}
    assert {shared.segments[i].author for i in kept} == {MODEL, TOOL}


def test_metrics_by_hand():
    tree = grown([[None, None, [None]], None, [None]])  # 1: leaves 2, 3, and 4 with leaf 5; leaf 6; 7 with leaf 8
    for _ in range(2):
        tree.add(1, [model(2, 1002)], ended=True)
    tree.prune(8)
    assert tree.metrics() == {"nodes_made": 8, "nodes_pruned": 2, "nodes_kept": 6, "leaves": 4, "depth": 3}


def test_a_deep_tree_needs_no_recursion():
    tree, at = frontier(), ROOT
    for depth in range(3000):
        at = tree.add(at, [model(depth)], ended=depth == 2999)
    assert len(tree.path(at).tokens) == 3000 and tree.leaves() == [at]
    tree.prune(at)
    assert tree.n_kept == 0


def dropping(*parents: int) -> Frontier:
    """Open steps with these parents, of a frontier that keeps what it drops; step i has the tokens i and 1000 + i."""
    tree = Frontier(TrajectoryTree([100, 101]), keeps_tokens=True)
    for number, parent in enumerate(parents, start=1):
        tree.add(parent, [model(number, 1000 + number)], ended=False)
    return tree


def test_dropped_steps_are_rows_of_their_own_with_all_that_is_before_them():
    #       1 ─┬─ 2      4 ─── 5 ─── 6      7
    #          └─ 3
    tree = dropping(ROOT, 1, 1, ROOT, 4, 5, ROOT)
    for number in (2, 6, 3):
        tree.prune(number)
    assert tree.dropped == [2, 6, 3] and [tree.is_kept(i) for i in range(1, 8)] == [False] * 6 + [True]
    tree.add(7, [model(70)], ended=True)
    assert tree.train_dropped(5, seed=0) == [2, 3, 6]
    assert [list(tree.path(i).tokens) for i in (2, 3, 6)] == [
        [1, 1001, 2, 1002],
        [1, 1001, 3, 1003],
        [4, 1004, 5, 1005, 6, 1006],
    ]
    marked = [i for i in range(1, len(tree.steps)) if tree.tree.is_dropped(tree.steps[i].segments[0])]
    assert marked == [2, 3, 6], "not what is before them, which answers may share"
    assert tree.leaves() == [8] and tree.metrics()["leaves"] == 1 and tree.metrics()["nodes_pruned"] == 6


def test_a_seed_chooses_among_dropped_steps_and_the_others_release_their_tokens():
    seen = Counter()
    for seed in range(600):
        tree = dropping(ROOT, 1, 1, ROOT, ROOT)
        for number in (2, 3, 4, 5):
            tree.prune(number)
        chosen = tree.train_dropped(2, seed)
        seen.update(chosen)
        on_paths = {*chosen} | ({1} if {2, 3} & {*chosen} else set())
        for number in range(1, 6):
            segment = tree.tree.segments[number - 1]
            assert bool(segment.token_ids) == (number in on_paths)
            assert segment.info.notes["pruned"] and (DROPPED_STEPS.name in segment.info.fields) == (number in chosen)
    assert all(seen[number] / 600 == pytest.approx(1 / 2, abs=0.07) for number in (2, 3, 4, 5))
    assert tree.train_dropped(0, 0) == [] and not any(segment.token_ids for segment in tree.tree.segments)


def test_an_answer_that_a_beam_has_dropped_is_no_row():
    tree = Frontier(TrajectoryTree([100]), keeps_tokens=True)
    tree.add(ROOT, [model(5)], ended=True)
    tree.prune(tree.add(ROOT, [model(6)], ended=True))
    tree.prune(tree.add(ROOT, [model(7)], ended=False))
    assert tree.train_dropped(9, 0) == [3] and [bool(s.token_ids) for s in tree.tree.segments] == [True, False, True]
