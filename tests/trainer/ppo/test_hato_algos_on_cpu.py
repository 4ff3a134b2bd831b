"""HATO's sibling-relative advantage: the worked example, a slow oracle, merged siblings, degenerate batches."""

import json
import math
import random

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from tests.workers.rollout.trees.hato.trees import grown, random_tree
from verl import DataProto
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
from verl.workers.rollout.trees.hato.config import ExplorationConfig, RewardWeights, TreeConfig
from verl.workers.rollout.trees.hato.rewards import node_rewards
from verl.workers.rollout.trees.hato.search import Search
from verl.workers.rollout.trees.hato.tree import ReasoningTree


def columns_of(tree: ReasoningTree, rewards: list[float]) -> TreeColumns:
    return TreeColumns(tree.parents(), rewards, tree.trained_counts())


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
                while len(family) == 1 and node.parent is not None:  # a chain is one step
                    number = node.parent
                    node = tree.nodes[number]
                    siblings = tree.nodes[node.parent].children if node.parent is not None else []
                    family = [c for c in siblings if tree.nodes[c].status != "pruned"]
                    values = [of_node[child] for child in family for _ in range(tree.nodes[child].count)]
                if row.node_ids[t] not in fresh or len(values) < 2 or max(values) - min(values) < 1e-9:
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
    # the third first step and what follows it are a chain
    expected = {"families": 3, "family_size": 7 / 3, "flat_families": 2 / 3, "flat_tokens": 1 - 2 / 9}
    assert metrics == pytest.approx(expected)


def test_rewards_that_differ_by_rounding_are_equal():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    advantages, varies = sibling_advantages(rewards, torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.long))
    assert not varies.any() and (advantages == 0).all()


def test_empty_batches_and_wrong_shapes():
    empty = collate_steps([], [None, None], width=3)
    mask = torch.ones(2, 3)
    assert (advantages_of(empty, mask) == 0).all()
    nothing = {"families": 0, "family_size": 0, "flat_families": 1, "flat_tokens": 1}
    assert family_metrics(empty, mask) == nothing, "no signal at all"
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


# -- from the rollout to the advantage, as the trainer goes --

ROOM = 12  # response tokens


def grow(uid: str) -> ReasoningTree:
    """A policy that draws a digit per step; the path is right when its digits add up to at least 8."""
    rng, config = random.Random(uid), TreeConfig(max_depth=3, branching_factor=3)
    tree = ReasoningTree([1, 2, 3], max_nodes=config.max_nodes)
    search = Search(tree, config, ExplorationConfig(), n_leaves=8, seed=len(uid), temperature=1.0)
    while expansions := search.next():
        for one in expansions:
            for _ in range(one.children):
                tree.add(one.node, [rng.randrange(5)], [-1.6], ended=one.to_the_end, value=rng.random())
    return tree


def test_a_batch_through_upstreams_advantage():
    grown_trees = {uid: grow(uid) for uid in ("a", "b", "c")}
    rows = {f"{uid}_{i}_0": row for uid, tree in grown_trees.items() for i, row in enumerate(tree.rows(8))}
    rewards = {key: float(sum(row.token_ids) >= 8) for key, row in rows.items()}  # the whole path is verified
    received = {uid: json.dumps(tree.structure()) for uid, tree in grown_trees.items()}

    trees = {uid: ReasoningTree.from_structure(json.loads(text)) for uid, text in received.items()}
    for key, row in rows.items():
        trees[key[0]].nodes[row.leaf].outcome = rewards[key]
    of_nodes = {uid: node_rewards(tree, RewardWeights(alpha=0, beta=1, gamma=1), 0.5) for uid, tree in trees.items()}
    numbers = {uid: number for number, uid in enumerate(trees)}
    steps = collate_steps(
        [columns_of(tree, of_nodes[uid].total) for uid, tree in trees.items()],
        [(numbers[key[0]], row.node_ids) for key, row in rows.items()],
        ROOM,
    )
    mask = torch.tensor([row.mask + [0] * (ROOM - len(row.mask)) for row in rows.values()])
    scores = torch.zeros(mask.shape)
    scores[:, 0] = torch.tensor(list(rewards.values()))
    data = DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": mask},
        non_tensors={"uid": np.array([key[0] for key in rows], dtype=object)},
    )
    with given_steps(steps):
        data = compute_advantage_for_multi_trajectories(data, list(rows), "hato", config={})
    assert data.batch["advantages"].shape == mask.shape

    trained = {uid: {} for uid in trees}
    for key, advantages, of_row in zip(rows, data.batch["advantages"].tolist(), mask.tolist(), strict=True):
        for node, advantage, on in zip(rows[key].node_ids, advantages, of_row, strict=False):
            if on:
                assert node not in trained[key[0]], "one token per step here: each is trained once"
                trained[key[0]][node] = advantage
    for uid, tree in trees.items():
        assert trained[uid].keys() == {i for i in range(1, len(tree.nodes)) if tree.is_kept(i)}
        for number, node in enumerate(tree.nodes):
            family = [(of_nodes[uid].total[child], trained[uid][child]) for child in node.children]
            best, worst = max(family, default=(0, 0)), min(family, default=(0, 0))
            assert (best[1] > 0 > worst[1]) == (best[0] > worst[0]), number
    assert any(advantage for of_tree in trained.values() for advantage in of_tree.values())


def test_it_is_registered():
    assert get_adv_estimator_fn("hato") is compute_hato_advantage
