"""Merging, pruning, batch rows and conversions of reasoning trees."""

import json
from collections import Counter

import pytest

from tests.workers.rollout.trees.hato.trees import grown, random_tree
from verl.workers.rollout.trajectory_tree import TrajectoryTree
from verl.workers.rollout.trees.hato.tree import LEAF, OPEN, PRUNED, ROOT, ReasoningTree


def test_identical_siblings_are_one_node_that_counts():
    tree = ReasoningTree([1])
    first = tree.add(ROOT, [5, 6], [-1.0, -2.0], ended=False, value=0.3)
    assert tree.add(ROOT, [5, 6], [-1.0, -2.0], ended=False, value=0.9) == first
    other = tree.add(ROOT, [5, 7], [-1.0, -3.0], ended=True)
    assert tree.add(first, [5, 6], [-1.0, -1.0], ended=True) not in (first, other)  # equal tokens, another parent
    assert [node.count for node in tree.nodes] == [1, 2, 1, 1]
    assert (tree.n_kept, tree.nodes[first].value, tree.nodes[ROOT].children) == (3, 0.3, [1, 2])


def test_pruning_releases_what_is_below_and_what_has_become_empty_above():
    #       1 ─ 2 ─┬─ 3 ─ 4        5 ─ 6
    #              └─ (later 7)
    tree = grown([[[[1.0]]], [0.0]])
    tree.prune(4)
    assert [node.status for node in tree.nodes[1:5]] == [PRUNED] * 4, "1 to 3 led to 4 alone"
    assert all(not node.token_ids and not node.log_probs and node.n_tokens == 2 for node in tree.nodes[1:5])
    assert (tree.leaves(), tree.n_kept, tree.kept_children(ROOT)) == ([6], 2, [5])
    tree.prune(3)  # again
    assert tree.n_kept == 2
    tree.prune(5)
    assert (tree.leaves(), tree.n_kept, tree.nodes[ROOT].status) == ([], 0, "expanded")
    with pytest.raises(ValueError, match="root"):
        tree.prune(ROOT)


def test_pruning_one_of_two_keeps_the_way_to_the_other():
    tree = grown([[1.0, [0.0, 0.0]]])
    tree.prune(4)
    assert tree.leaves() == [2, 5]
    tree.prune(5)
    assert tree.leaves() == [2] and not tree.is_kept(3) and tree.is_kept(1)


def test_a_pruned_step_that_is_drawn_again_is_a_new_node():
    tree = ReasoningTree([1])
    tree.add(ROOT, [4], [-1.0], ended=True)
    tree.prune(tree.add(ROOT, [5], [-1.0], ended=False))
    assert tree.add(ROOT, [5], [-1.0], ended=False) == 3


def test_a_full_tree_and_impossible_steps_are_refused():
    tree = ReasoningTree([1], max_nodes=2)
    leaf, step = tree.add(ROOT, [5], [-1.0], ended=True), tree.add(ROOT, [6], [-1.0], ended=False)
    with pytest.raises(ValueError, match="hato.tree.max_nodes=2"):
        tree.add(step, [7], [-1.0], ended=True)
    assert tree.add(ROOT, [6], [-1.0], ended=False) == step  # a merged one needs no room
    with pytest.raises(ValueError, match="node 1 is leaf"):
        tree.add(leaf, [7], [-1.0], ended=True)
    with pytest.raises(ValueError, match="1 log_probs for 2 tokens"):
        tree.add(step, [7, 8], [-1.0], ended=True)
    tree.prune(leaf)
    assert tree.add(step, [7], [-1.0], ended=True) == 3  # there is room again


def test_rows_by_hand():
    tree = grown([[1.0, 0.0], 0.0])
    rows = tree.rows(4)
    assert [row.leaf for row in rows] == [2, 3, 4, 2]
    assert [row.node_ids for row in rows] == [[1, 1, 2, 2], [1, 1, 3, 3], [4, 4], [1, 1, 2, 2]]
    assert [row.mask for row in rows] == [[1, 1, 1, 1], [0, 0, 1, 1], [1, 1], [0, 0, 0, 0]]
    assert rows[1].token_ids == [1, 1001, 3, 1003] and rows[1].log_probs == [-0.5, -1.0, -0.5, -3.0]
    with pytest.raises(ValueError, match="3 leaves for 2 rows"):
        tree.rows(2)
    with pytest.raises(ValueError, match="0 leaves"):
        ReasoningTree([1]).rows(2)


@pytest.mark.parametrize("seed", range(20))
def test_every_kept_token_is_trained_exactly_once(seed):
    tree = random_tree(seed)
    trained = Counter()
    for row in tree.rows(len(tree.leaves()) + 3):
        assert row.token_ids == tree.path_tokens(row.leaf)
        assert len(row.token_ids) == len(row.log_probs) == len(row.mask) == len(row.node_ids)
        trained.update(node for node, mask in zip(row.node_ids, row.mask, strict=True) if mask)
    assert trained == {i: node.n_tokens for i, node in enumerate(tree.nodes) if i and tree.is_kept(i)}


@pytest.mark.parametrize("seed", range(20))
def test_kept_nodes_are_those_with_a_leaf_below(seed):
    """Every node of a finished tree is on a way to a leaf; all others hold nothing."""
    tree = random_tree(seed)
    on_paths = {step for leaf in tree.leaves() for step in tree.path(leaf)}
    assert on_paths == {i for i in range(1, len(tree.nodes)) if tree.is_kept(i)}
    assert tree.n_kept == len(on_paths)
    assert all(tree.nodes[i].token_ids == [] for i in range(1, len(tree.nodes)) if i not in on_paths)


@pytest.mark.parametrize("seed", range(5))
def test_the_structure_survives_json(seed):
    tree = random_tree(seed)
    again = ReasoningTree.from_structure(json.loads(json.dumps(tree.structure())))
    assert again.structure() == tree.structure()
    assert (again.leaves(), again.n_kept) == (tree.leaves(), tree.n_kept)
    assert [(node.depth, node.children) for node in again.nodes] == [(node.depth, node.children) for node in tree.nodes]


@pytest.mark.parametrize("seed", range(5))
def test_the_shared_tree_has_the_same_trajectories(seed):
    tree = random_tree(seed)
    rows = tree.rows(len(tree.leaves()) + 1)
    shared = TrajectoryTree.from_json(tree.to_trajectory_tree([row.leaf for row in rows]).to_json())
    assert shared.trajectories() == [row.token_ids for row in rows]
    assert shared.log_probs() == [row.log_probs for row in rows]
    assert [[i + 1 for i in ids] for ids in shared.segment_ids()] == [row.node_ids for row in rows]
    dropped = [segment for segment in shared.segments if "pruned" in segment.info]
    assert all(not segment.token_ids and segment.info["n_tokens"] for segment in dropped)


def test_a_deep_tree_needs_no_recursion():
    tree, at = ReasoningTree([1]), ROOT
    for depth in range(5000):
        at = tree.add(at, [depth], [0.0], ended=depth == 4999)
    assert len(tree.path_tokens(at)) == 5000 and tree.leaves() == [at]
    tree.prune(at)
    assert tree.n_kept == 0


def test_the_root_is_open_at_first():
    tree = ReasoningTree([1])
    assert tree.open_nodes() == [ROOT] and tree.nodes[ROOT].status == OPEN and LEAF != OPEN
