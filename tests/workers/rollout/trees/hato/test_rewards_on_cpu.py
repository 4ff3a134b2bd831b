"""Rewards of every node by hand, against a slow reference over random trees, and the local heuristics."""

import asyncio
import math

import pytest

from tests.workers.rollout.trees.hato.trees import grown, random_tree
from verl.workers.rollout.trees.hato.config import RewardWeights
from verl.workers.rollout.trees.hato.rewards import (
    Step,
    coherence,
    heuristic,
    leaf_outcomes,
    local_reward,
    local_reward_function,
    node_rewards,
    progress,
    successful_leaves,
)
from verl.workers.rollout.trees.hato.tree import LEAF, PRUNED, ROOT, ReasoningTree

WEIGHTS = RewardWeights(alpha=0.1, beta=0.6, gamma=0.3)


def test_the_docstrings_example():
    rewards = node_rewards(grown([[1.0, 0.0], 0.0]), WEIGHTS, 0.5)
    assert rewards.path == [1, 1, 1, 0, 0]
    assert rewards.causal == [1, 0.5, 1, 0, 0]
    assert rewards.total == pytest.approx([0.9, 0.75, 0.9, 0, 0])


def test_three_levels_by_hand():
    #           1 ─┬─ 2 ─┬─ 3 right
    # problem ─┤   │     └─ 4 wrong (0.5 is not above the threshold)
    #          │   └─ 5 ─── 6 right
    #          └─ 7 ─┬─ 8 right
    #                └─ 9 wrong
    tree = grown([[[1.0, 0.5], [0.7]], [1.0, 0.0]])
    rewards = node_rewards(tree, WEIGHTS, 0.5)
    assert successful_leaves(tree, 0.5) == [3, 6, 8]
    assert rewards.path == [1, 1, 1, 1, 0.5, 0.7, 0.7, 1, 1, 0]
    expected = [1, 2 / 3 - 1 / 2, 0, 1, 0, 1 - 1 / 2, 0.7, 0, 1, 0]  # 2: 1/2 - 1 and 7: 1/2 - 2/3 are floored
    assert rewards.causal == pytest.approx(expected)


def test_the_form_of_a_wrong_answer_counts_and_rewards_outside_are_cut():
    rewards = node_rewards(grown([[0.1, 0.0], [-1.0, 3.0]]), WEIGHTS, 0.5)
    assert rewards.path == [1, 0.1, 0.1, 0, 1, 0, 1]
    assert rewards.causal == pytest.approx([1, 0, 0, 0, 0.5, 0, 1])
    mean = node_rewards(grown([[0.1, 0.0], [-1.0, 3.0]]), WEIGHTS, 0.5, path_reward="mean")
    assert mean.path == pytest.approx([1.1 / 4, 0.05, 0.1, 0, 0.5, 0, 1])


def test_a_leaf_drawn_twice_counts_twice():
    tree = grown([[1.0, 0.0], 1.0, 0.0])
    tree.nodes[2].count = 3  # node 1: 3/4; its siblings: 1/2
    assert node_rewards(tree, WEIGHTS, 0.5).causal[1] == pytest.approx(0.25)


def test_a_step_drawn_twice_counts_twice_for_those_above():
    tree = grown([[[1.0], [0.0]], 0.0])  # 1: 2 with leaf 3 (right), 4 with leaf 5; leaf 6
    tree.nodes[2].count = 3
    assert leaf_outcomes(tree, 0.5).right[1] == 3 and leaf_outcomes(tree, 0.5).verified[1] == 4
    assert node_rewards(tree, WEIGHTS, 0.5).causal[1] == 0.75


def test_the_mean_in_place_of_the_best():
    rewards = node_rewards(grown([[1.0, 0.0], 0.0]), WEIGHTS, 0.5, path_reward="mean")
    assert rewards.path == pytest.approx([1 / 3, 1 / 2, 1, 0, 0])


def test_what_is_pruned_or_not_verified_tells_nothing():
    tree = grown([[1.0, 0.0], 0.0, None])
    tree.nodes[1].local_reward = tree.nodes[4].local_reward = 1.0
    tree.prune(4)
    rewards = node_rewards(tree, WEIGHTS, 0.5)
    assert rewards.causal[1] == 1.0, "no sibling that tells anything: R_path"
    assert (rewards.path[5], rewards.causal[5]) == (0, 0)
    assert rewards.total[4] == pytest.approx(0.1), "a pruned node has its local reward"
    assert rewards.total[1] == pytest.approx(0.1 + 0.6 + 0.3)


def test_no_answer_at_all():
    rewards = node_rewards(ReasoningTree([1]), WEIGHTS, 0.5)
    assert rewards.total == [0.0]


def slow_rewards(tree, threshold):
    """By definition, node by node: the leaves below, listed."""

    def known(number, itself=False):
        found = []
        for leaf, node in enumerate(tree.nodes):
            path = [ROOT, *tree.path(leaf)]
            if node.status != LEAF or node.outcome is None or number not in path:
                continue
            below = path[path.index(number) + (not itself) :]
            times = math.prod(tree.nodes[step].count for step in below)
            found += [node.outcome] * times
        return found

    path, causal = [], []
    for number, node in enumerate(tree.nodes):
        own = known(number) if node.status != PRUNED else []
        path.append(min(1.0, max([0.0, *own])))
        own = [outcome > threshold for outcome in own]
        family = tree.nodes[node.parent].children if node.parent is not None else []
        others = [
            x for sibling in family if sibling != number and tree.is_kept(sibling) for x in known(sibling, itself=True)
        ]
        others = [outcome > threshold for outcome in others]
        if not any(own):
            causal.append(0.0)
        elif not others:
            causal.append(path[-1])
        else:
            causal.append(max(0.0, sum(own) / len(own) - sum(others) / len(others)))
    return path, causal


@pytest.mark.parametrize("seed", range(40))
def test_random_trees_against_the_slow_reference(seed):
    tree = random_tree(seed)
    rewards = node_rewards(tree, WEIGHTS, 0.05)
    path, causal = slow_rewards(tree, 0.05)
    assert rewards.path == path and rewards.causal == pytest.approx(causal)
    for number, node in enumerate(tree.nodes):
        assert rewards.total[number] == pytest.approx(
            0.1 * node.local_reward + 0.6 * path[number] + 0.3 * causal[number]
        )
        assert 0 <= rewards.causal[number] <= 1


@pytest.mark.parametrize("seed", range(10))
def test_siblings_differ_in_r_path_exactly_where_leaves_differ_in_reward(seed):
    """So a tree without a signal of the verifier is one whose leaves are all worth the same."""
    for count in (2, 6, 40):
        tree = random_tree(seed, size=count, pruned=1)
        for leaf in tree.leaves():
            tree.nodes[leaf].outcome = tree.nodes[leaf].outcome or 0.0
        path = node_rewards(tree, WEIGHTS, 0.5).path
        families = [{path[child] for child in tree.kept_children(i)} for i in range(len(tree.nodes))]
        leaves_differ = len({tree.nodes[leaf].outcome for leaf in tree.leaves()}) > 1
        assert any(len(family) > 1 for family in families) == leaves_differ


def test_a_chain_of_thousands_of_steps():
    tree, at = ReasoningTree([1]), ROOT
    for depth in range(20_000):
        at = tree.add(at, [depth], [0.0], ended=depth == 19_999)
    tree.nodes[at].outcome = 1.0
    assert set(node_rewards(tree, WEIGHTS, 0.5).total) == {0.6 + 0.3}


# -- local rewards --

PROBLEM = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("before", "parent", "tokens", "expected_coherence", "expected_progress"),
    [
        ([], PROBLEM, [1, 2, 3], 1.0, 0.0),  # repeats the problem
        ([], PROBLEM, [8, 9, 7], 0.0, 1.0),  # speaks of something else
        ([], PROBLEM, [1, 3, 9], 2 / 3, 1.0),
        ([5, 6, 7], [6, 7], [6, 7, 5], 2 / 3, 1 / 2),  # (6, 7) was said before; 5 is not in the parent
        ([], PROBLEM, [9], 0.0, 1.0),
        ([9], [9], [9], 1.0, 0.0),
        ([], PROBLEM, [], 0.0, 0.0),
    ],
)
def test_heuristics_by_hand(before, parent, tokens, expected_coherence, expected_progress):
    step = Step(problem=PROBLEM, before=before, parent=parent, tokens=tokens)
    assert coherence(step) == pytest.approx(expected_coherence)
    assert progress(step) == pytest.approx(expected_progress)
    product, total = expected_coherence * expected_progress, expected_coherence + expected_progress
    assert heuristic(step) == pytest.approx(2 * product / total if total else 0.0)


def test_a_function_by_its_name():
    assert local_reward_function("heuristic") is heuristic
    assert local_reward_function("math.fsum").__name__ == "fsum"
    for name in ("no_such_module.f", "math.no_such_function", "bare"):
        with pytest.raises(ValueError, match=f"hato.local_reward={name}"):
            local_reward_function(name)
    with pytest.raises(ValueError, match="found float"):
        local_reward_function("math.pi")


def test_a_functions_number_is_cut_and_must_be_finite():
    step = Step(problem=[], before=[], parent=[], tokens=[])

    async def slow(_):
        await asyncio.sleep(0)
        return 0.25

    found = [asyncio.run(local_reward(function, step)) for function in (lambda _: 3, lambda _: -3, slow)]
    assert found == [1.0, 0.0, 0.25]
    with pytest.raises(ValueError, match="returned nan"):
        asyncio.run(local_reward(lambda _: float("nan"), step))
