"""Advantages on trees: by hand, against slow versions written out token by token, and on degenerate batches."""

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    compute_grpo_outcome_advantage,
    get_adv_estimator_fn,
)

from recipe.arpo.credit import compute_arpo_hard_advantage
from verl.trainer.ppo.credit.nodes import credit_metrics, tree_nodes
from verl.utils.parts import GROUP_COMPARISONS, Compares, compares, parts
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS

ESTIMATORS = ("arpo_hard", "tree_path", "tree_gain", "treerl")
# credits that need nothing but rewards
GROUP_RELATIVE = {
    name
    for name, credit in parts("credit").items()
    if credit.compares in GROUP_COMPARISONS and not (credit.needs or credit.reward_fields)
}


def advantage(estimator, rewards, mask, index, segment_ids, **config):
    with SEGMENT_IDS.bound(segment_ids):
        return get_adv_estimator_fn(estimator)(rewards, mask, index, config=config)[0]


def hard_advantage(*arguments, **config):
    return advantage("arpo_hard", *arguments, **config)


def test_the_advantages_by_hand():
    """Four trajectories of one prompt with advantages 3, 1, -1, -3; `|` marks where the first three part.

    a: 0 0 7 | 1 1        7 is a tool's token
    b: 0 0 7 | 2 3        b and c part again after 2
    c: 0 0 7 | 2
    d: 4 4
    """
    segment_ids = torch.tensor([[0, 0, 7, 1, 1], [0, 0, 7, 2, 3], [0, 0, 7, 2, -1], [4, 4, -1, -1, -1]])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 1, 1], [1, 1, 0, 1, 0], [1, 1, 0, 0, 0]])
    rewards = torch.zeros(4, 5)
    rewards[:, 0] = torch.tensor([3.0, 1.0, -1.0, -3.0])
    batch = rewards, mask, np.array(["u"] * 4), segment_ids
    of_segment = {
        "arpo_hard": {0: 1, 1: 3, 2: 0, 3: 1, 4: -3},
        "tree_path": {0: 1 / 3, 1: 3, 2: 0, 3: 1, 4: -3},
        # V(0) = 1 after the root's 0, V(1) = 3 and V(2) = 0 after V(0), V(3) = 1 after V(2)
        "tree_gain": {0: (1 + 1) / 3, 1: 3 + 2, 2: (0 - 1) / 2, 3: 1 + 1, 4: -3 - 3},
        "treerl": {0: (1 + 1) / math.sqrt(3), 1: 3 + 2, 2: (0 - 1) / math.sqrt(2), 3: 1 + 1, 4: -3 - 3},
    }
    for estimator, values in of_segment.items():
        expected = torch.tensor([[float(values.get(i, 0)) for i in row] for row in segment_ids.tolist()]) * mask
        plain = advantage(estimator, *batch, norm_adv_by_std_in_grpo=False)
        torch.testing.assert_close(plain, expected)
        scale = 1 if estimator == "treerl" else math.sqrt(20 / 3)
        torch.testing.assert_close(advantage(estimator, *batch), plain / scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_segment_cut_in_two_is_still_one_node(estimator):
    """Nothing is decided where a tool's result or a step ends a segment without a fork."""
    index, segment_ids, mask, rewards = random_forest(3)
    cut = torch.where(torch.arange(segment_ids.shape[1]) % 2 == 1, segment_ids + 1000, segment_ids)
    cut = torch.where(segment_ids >= 0, cut, -1)
    whole, halves = (advantage(estimator, rewards, mask, index, ids) for ids in (segment_ids, cut))
    torch.testing.assert_close(whole, halves)


@pytest.mark.parametrize("seed", range(3))
def test_the_gain_token_by_token(seed):
    """A node is the set of the trajectories that go through it; its parent is the next larger set on the path."""
    index, segment_ids, mask, rewards = random_forest(seed)
    scores = rewards.sum(-1).tolist()
    gain = advantage("tree_gain", rewards, mask, index, segment_ids, norm_adv_by_std_in_grpo=False)
    treerl = advantage("treerl", rewards, mask, index, segment_ids)
    for i, t in mask.nonzero().tolist():
        group = {j for j in range(len(index)) if index[j] == index[i]}
        nodes = [{j for j in group if s in segment_ids[j].tolist()} for s in segment_ids[i, : t + 1].tolist()]
        node, root = nodes[-1], np.mean([scores[j] for j in group])
        larger = [other for other in nodes if len(other) > len(node)]
        value = np.mean([scores[j] for j in node])
        parent = np.mean([scores[j] for j in larger[-1]]) if larger else root
        expected = value - root + value - parent
        assert gain[i, t].item() == pytest.approx(expected / len(node), abs=1e-5)
        assert treerl[i, t].item() == pytest.approx(expected / math.sqrt(len(node)), abs=1e-5)


def random_forest(seed: int, groups: int = 5, n: int = 6, length: int = 12):
    """Rows of `groups` prompts, shuffled: (index, segment_ids, mask, rewards). Ids repeat across groups.

    A trajectory is cut into blocks; its first few are those of another of its group.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        fresh, of_group = 0, []
        for _ in range(n):
            kept = of_group[generator.integers(len(of_group))] if of_group and generator.random() < 0.7 else []
            blocks = list(kept[: generator.integers(len(kept) + 1)])
            while sum(size for _, size in blocks) < length - 3:
                blocks.append((fresh, int(generator.integers(1, 4))))
                fresh += 1
            of_group.append(blocks)
            rows.append((f"prompt {group}", [name for name, size in blocks for _ in range(size)]))
    rows = [rows[i] for i in generator.permutation(len(rows))]
    segment_ids = torch.tensor([ids + [-1] * (length - len(ids)) for _, ids in rows])
    mask = (segment_ids >= 0) & (segment_ids % 4 != 3)  # every fourth segment is a tool's
    rewards = torch.zeros(len(rows), length)
    rewards[:, -1] = torch.from_numpy(generator.integers(0, 3, len(rows))).float()
    return np.array([uid for uid, _ in rows], dtype=object), segment_ids, mask.long(), rewards


def slow_hard_advantage(rewards, mask, index, segment_ids):
    scores = [sum(row) for row in rewards.tolist()]
    soft = []
    for uid, score in zip(index, scores, strict=True):
        of_group = [s for s, other in zip(scores, index, strict=True) if other == uid]
        soft.append((score - np.mean(of_group)) / (np.std(of_group, ddof=1) + 1e-6))
    hard = torch.zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        segment = segment_ids[i, t].item()
        through = [soft[j] for j in range(len(index)) if index[j] == index[i] and segment in segment_ids[j].tolist()]
        hard[i, t] = np.mean(through)
    return hard


@pytest.mark.parametrize("seed", range(5))
def test_the_hard_advantage_token_by_token(seed):
    index, segment_ids, mask, rewards = random_forest(seed)
    hard = hard_advantage(rewards, mask, index, segment_ids)
    torch.testing.assert_close(hard, slow_hard_advantage(rewards, mask, index, segment_ids), rtol=1e-4, atol=1e-5)
    soft, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    assert (hard - soft).abs().max() > 0.1
    # where every trajectory has the whole segment, averaging moves advantage but makes none
    assert hard.sum().item() == pytest.approx(soft.sum().item(), abs=1e-3)


def test_a_masked_trajectory_still_counts_for_its_segments():
    ids, mask = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[1, 1], [0, 0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    hard = hard_advantage(rewards, mask, np.array([0, 0]), ids, norm_adv_by_std_in_grpo=False)
    assert hard.tolist() == [[0.0, 0.5], [0.0, 0.0]]


def test_missing_and_misshapen_segments_are_named():
    rewards, mask, index = torch.zeros(2, 3), torch.ones(2, 3), np.array([0, 0])
    with pytest.raises(RuntimeError, match="adv_estimator needs every token's segment_ids"):
        compute_arpo_hard_advantage(rewards, mask, index)
    with pytest.raises(ValueError, match=r"segment_ids \(2, 2\): expected \(2, 3\)"):
        hard_advantage(rewards, mask, index, torch.zeros(2, 2, dtype=torch.long))


# -- rows alone in their group --


def group_relative(name: str, rewards, mask, index) -> torch.Tensor:
    n = torch.full(mask.shape, 0.5)
    extra = {"old_log_probs": -n, "sum_pi_squared": n} if "optimal" in name else {}
    return get_adv_estimator_fn(name)(rewards, mask, index=index, config={}, **extra)[0]


@pytest.mark.parametrize("name", sorted(GROUP_RELATIVE - {"grpo_passk"}))  # grpo_passk raises for a row alone
def test_these_compare_the_rows_of_a_prompt(name):
    rewards, mask = torch.zeros(4, 3), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0.0]])
    rewards[:, 0] = torch.tensor([1.0, 0.0, 7.0, 3.0])
    upstream = group_relative(name, rewards, mask, np.array(["a", "a", "b", "c"], dtype=object))
    assert compares(name) in GROUP_COMPARISONS and upstream[:2].abs().max() > 0


def test_every_estimator_of_upstream_has_been_thought_about():
    elsewhere = {"gae", "remax", "reinforce_plus_plus"}
    assert {member.value for member in AdvantageEstimator} - elsewhere == GROUP_RELATIVE - {"hapo"}
    assert set(ADV_ESTIMATOR_REGISTRY) >= GROUP_RELATIVE
    assert compares(AdvantageEstimator.GRPO) is Compares.GROUP and compares(AdvantageEstimator.GAE) is None


# -- what the trainer reports --


@pytest.mark.parametrize("credit", ["grpo", *ESTIMATORS])
def test_metrics_share_the_estimators_nodes(credit, monkeypatch):
    index, segment_ids, mask, rewards = random_forest(2)
    made = []
    monkeypatch.setattr("verl.trainer.ppo.credit.nodes.tree_nodes", lambda *args: made.append(0) or tree_nodes(*args))
    with SEGMENT_IDS.bound(segment_ids):
        get_adv_estimator_fn(credit)(rewards, mask, index)
        metrics = credit_metrics(rewards, mask, index)
    assert len(made) == 1
    soft, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    difference = (slow_hard_advantage(rewards, mask, index, segment_ids) - soft).abs().sum() / mask.sum()
    assert metrics["credit/hard_minus_soft"] == pytest.approx(difference.item(), rel=1e-3)
    rows = segment_ids.tolist()
    shared = [
        sum(index[i] == index[j] and rows[i][t] in rows[j] for j in range(len(rows))) > 1
        for i, t in mask.nonzero().tolist()
    ]
    assert metrics["credit/shared_tokens"] == pytest.approx(np.mean(shared), rel=1e-5)
