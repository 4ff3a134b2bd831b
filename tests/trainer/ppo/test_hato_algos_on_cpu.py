"""HATO's sibling-relative advantage: the worked example, a slow oracle, merged siblings, degenerate batches."""

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from tests.workers.rollout.hato.trees import grown, random_tree
from verl.trainer.ppo.hato_algos import (
    Steps,
    TreeColumns,
    collate_steps,
    compute_hato_advantage,
    family_metrics,
    given_steps,
    informative_mask,
    sibling_advantages,
)
from verl.workers.rollout.hato.config import RewardWeights
from verl.workers.rollout.hato.rewards import node_rewards
from verl.workers.rollout.hato.tree import ReasoningTree


def columns_of(tree: ReasoningTree, rewards: list[float]) -> TreeColumns:
    counts = [node.count if tree.is_kept(i) else 0 for i, node in enumerate(tree.nodes)]
    return TreeColumns([node.parent for node in tree.nodes], rewards, counts)


def batch_of(trees: list[ReasoningTree], rewards: list[list[float]], more_rows: int = 0):
    """Steps and mask of all leaves' rows, and a padding row after each tree's."""
    rows, masks = [], []
    for number, tree in enumerate(trees):
        for row in tree.rows(len(tree.leaves()) + more_rows):
            rows.append((number, row.node_ids))
            masks.append(row.mask)
        rows.append(None)
        masks.append([])
    steps = collate_steps([columns_of(t, r) for t, r in zip(trees, rewards, strict=True)], rows)
    width = steps.node_ids.shape[1]
    return steps, torch.tensor([mask + [0] * (width - len(mask)) for mask in masks])


def advantages_of(steps: Steps, mask: torch.Tensor, **config) -> torch.Tensor:
    with given_steps(steps):
        advantages, returns = compute_hato_advantage(torch.zeros(mask.shape), mask, np.zeros(len(mask)), config=config)
    assert returns is advantages
    return advantages


def test_the_docstrings_example():
    tree = ReasoningTree([0])
    tree.add(0, [10, 11], [0.0, 0.0], ended=False)
    tree.add(1, [12], [0.0], ended=True)
    tree.add(1, [13], [0.0], ended=True)
    tree.add(0, [14, 15], [0.0, 0.0], ended=True)
    steps, mask = batch_of([tree], [[0.7, 0.7, 0.9, 0.1, 0.1]])
    expected = torch.tensor([[0.3, 0.3, 0.4], [0, 0, -0.4], [-0.3, -0.3, 0], [0, 0, 0]])
    torch.testing.assert_close(advantages_of(steps, mask, norm_adv_by_std_in_grpo=False), expected)
    # two values that differ: (R - mean) / std is 1 / sqrt(2)
    torch.testing.assert_close(advantages_of(steps, mask), expected.sign() / math.sqrt(2), rtol=1e-4, atol=1e-6)


def slow_advantages(trees, rewards, mask, more_rows, norm):
    """Token by token: the siblings listed, each as often as it was drawn."""
    slow, at = torch.zeros(mask.shape, dtype=torch.float64), 0
    for tree, of_node in zip(trees, rewards, strict=True):
        trained = set()
        for row in tree.rows(len(tree.leaves()) + more_rows):
            fresh = set(row.node_ids) - trained
            for t, number in enumerate(row.node_ids):
                node = tree.nodes[number]
                family = [c for c in tree.nodes[node.parent].children if tree.nodes[c].status != "pruned"]
                values = [of_node[child] for child in family for _ in range(tree.nodes[child].count)]
                if number not in fresh or len(values) < 2 or max(values) - min(values) < 1e-9:
                    continue
                std = np.std(values, ddof=1) + 1e-6 if norm else 1.0
                slow[at, t] = node.count * (of_node[number] - np.mean(values)) / std
            trained |= fresh
            at += 1
        at += 1
    return slow.float()


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_against_the_slow_oracle(seed, norm):
    trees = [random_tree(seed * 10 + i, size=10 + 8 * i) for i in range(4)]
    weights = RewardWeights(alpha=0.0 if seed % 2 else 0.2, beta=0.6, gamma=0.2)
    rewards = [node_rewards(tree, weights, 0.5).total for tree in trees]
    steps, mask = batch_of(trees, rewards, more_rows=2)
    fast = advantages_of(steps, mask, norm_adv_by_std_in_grpo=norm)
    torch.testing.assert_close(fast, slow_advantages(trees, rewards, mask, 2, norm), rtol=1e-5, atol=1e-6)
    assert fast.isfinite().all() and (fast[mask == 0] == 0).all()


def test_merged_siblings_weigh_as_if_each_were_there():
    rewards, families = torch.tensor([0.9, 0.9, 0.9, 0.2, 0.4]), torch.zeros(5, dtype=torch.long)
    apart = sibling_advantages(rewards, families, torch.ones(5, dtype=torch.long)).advantages
    merged = sibling_advantages(rewards[2:], families[2:], torch.tensor([3, 1, 1])).advantages
    torch.testing.assert_close(merged, torch.stack([apart[:3].sum(), apart[3], apart[4]]))
    assert merged.sum().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_a_family_sum_to_zero_and_do_not_depend_on_other_families(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(50, generator=generator)
    families = torch.randint(0, 12, (50,), generator=generator)
    counts = torch.randint(0, 4, (50,), generator=generator)
    advantages, varies = sibling_advantages(rewards, families, counts)
    for family in families.unique():
        own = families == family
        assert advantages[own].sum().item() == pytest.approx(0, abs=1e-5)
        alone = sibling_advantages(rewards[own], torch.zeros(int(own.sum()), dtype=torch.long), counts[own])
        torch.testing.assert_close(alone.advantages, advantages[own])
        assert varies[own].all() or not varies[own].any()
    assert (advantages[counts == 0] == 0).all()


def test_families_without_variance_get_nothing_and_leave_the_mask():
    tree = grown([[1.0, 1.0], [0.0, 1.0], [[1.0]]])
    rewards = node_rewards(tree, RewardWeights(alpha=0, beta=1, gamma=0), 0.5).total
    steps, mask = batch_of([tree], [rewards])
    advantages = advantages_of(steps, mask)
    nodes_with_advantage = set(steps.node_ids[advantages != 0].tolist())
    assert nodes_with_advantage == {5, 6}, "all three first steps lead to a right answer; one pair of leaves differs"
    kept = informative_mask(steps, mask)
    assert set(steps.node_ids[kept.bool()].tolist()) == {5, 6} and kept.dtype == mask.dtype
    metrics = family_metrics(steps, mask)
    expected = {"families": 5, "family_size": 9 / 5, "flat_families": 4 / 5, "flat_tokens": 1 - 2 / 9}
    assert metrics == pytest.approx(expected)


def test_rewards_that_differ_by_rounding_are_equal():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    advantages, varies = sibling_advantages(rewards, torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.long))
    assert not varies.any() and (advantages == 0).all()


def test_empty_batches_and_wrong_shapes():
    empty = collate_steps([], [None, None], width=3)
    mask = torch.ones(2, 3)
    assert (advantages_of(empty, mask) == 0).all()
    assert family_metrics(empty, mask)["families"] == 0
    only_root = collate_steps([TreeColumns([None], [1.0], [1])], [(0, [])], width=2)
    assert family_metrics(only_root, torch.zeros(1, 2))["families"] == 0, "the problem is nobody's step"
    with given_steps(empty), pytest.raises(ValueError, match=r"node_ids \(2, 3\): expected \(2, 4\)"):
        compute_hato_advantage(torch.zeros(2, 4), torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="use the HATO trainer"):
        compute_hato_advantage(torch.zeros(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="row 0"):
        collate_steps([TreeColumns([None, 0], [1.0, 1.0], [1, 1])], [(0, [1, 2])])
    with pytest.raises(ValueError, match="row 0"):
        collate_steps([TreeColumns([None, 0], [1.0, 1.0], [1, 1])], [(0, [1, 1, 1])], width=2)


def test_it_is_registered():
    assert get_adv_estimator_fn("hato") is compute_hato_advantage
