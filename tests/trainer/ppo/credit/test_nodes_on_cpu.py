"""Nodes of a batch's trees: parents, rows through them, values, padding, rows without segments."""

import doctest

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl.trainer.ppo.credit import nodes as module
from verl.trainer.ppo.credit.nodes import (
    SEGMENT_IDS,
    Nodes,
    batch_nodes,
    node_values,
    trajectory_advantages,
    tree_nodes,
)

#   prompt a: 5 ─┬─ 2 ── 9        prompt b: 5, 2
#                └─ 7
IDS = torch.tensor([[5, 5, 2, 9, -1], [5, -1, -1, -1, -1], [5, 5, 7, 7, -1], [2, 2, -1, -1, -1]])
INDEX = np.array(["a", "b", "a", "b"], dtype=object)


def named(nodes: Nodes, numbers: torch.Tensor) -> list:
    """(prompt, segment) of nodes by their numbers; None for -1."""
    names = [(nodes.prompts[g], s) for g, s in zip(nodes.group.tolist(), nodes.segment.tolist(), strict=True)]
    return [None if number < 0 else names[number] for number in numbers.tolist()]


def test_the_docstrings_example():
    assert doctest.testmod(module).failed == 0


def test_parents_passing_rows_and_tokens():
    nodes = tree_nodes(IDS, INDEX)
    order = named(nodes, torch.arange(len(nodes)))
    assert order == [("a", 2), ("a", 5), ("a", 7), ("a", 9), ("b", 2), ("b", 5)], "a parent's id may be larger"
    assert named(nodes, nodes.parent) == [("a", 5), None, ("a", 5), ("a", 2), None, None]
    assert nodes.passing.tolist() == [1, 2, 1, 1, 1, 1]
    assert named(nodes, nodes.token_nodes[0]) == [("a", 5), ("a", 5), ("a", 2), ("a", 9), None]
    assert nodes.sum_below(torch.tensor([1.0, 2.0, 4.0, 8.0])).tolist() == [1, 5, 4, 1, 8, 2]
    assert nodes.sum_of_siblings(torch.arange(6)).tolist() == [0 + 2, 1, 0 + 2, 3, 4 + 5, 4 + 5]
    assert nodes.to_tokens(nodes.passing).tolist()[0] == [2, 2, 1, 1, 0]
    columns = torch.arange(5).expand(4, 5)
    assert nodes.at_first_token(columns).tolist() == [2, 0, 2, 3, 0, 0]


def test_nodes_by_their_segments():
    nodes = tree_nodes(IDS, INDEX)
    assert nodes.segment_nodes("a", [9, 5, 3]) == [3, 1, -1] and nodes.segment_nodes("b", [5, 9]) == [5, -1]
    for missing in ("0", "c"):
        with pytest.raises(KeyError, match="is not in this batch"):
            nodes.segment_nodes(missing, [1])


def test_tokens_without_segment_form_a_node_per_row_and_padding_none():
    ids = torch.tensor([[-1, -1, -1], [-1, -1, -1], [0, -1, -1], [0, -1, -1], [0, 1, -1]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1], [1, 1, 0]])
    nodes = tree_nodes(ids, np.array(["a"] * 5), mask)
    assert nodes.segment.tolist() == [0, 1, -1, -1]
    assert nodes.token_nodes.tolist() == [[2, 2, 2], [-1, -1, -1], [0, -1, -1], [0, 3, 3], [0, 1, -1]]
    assert nodes.parent.tolist() == [-1, 0, -1, 0] and nodes.passing.tolist() == [3, 1, 1, 1]


def test_a_trajectory_that_is_there_twice_counts_twice():
    nodes = tree_nodes(torch.tensor([[0, 1], [0, 1], [0, 2]]), np.zeros(3))
    assert nodes.passing.tolist() == [3, 2, 1]
    assert node_values(nodes, torch.tensor([1.0, 1.0, -2.0])).value.tolist() == [0, 1, -2]


def test_a_truncated_or_interrupted_segment_counts_its_trajectory_once():
    nodes = tree_nodes(torch.tensor([[0, 0, 0, 0], [0, 3, 0, 0], [0, 4, 4, 4]]), np.zeros(3))
    assert nodes.passing.tolist() == [3, 1, 1] and nodes.parent.tolist() == [-1, 0, 0]
    assert node_values(nodes, torch.tensor([3.0, 6.0, 9.0])).value.tolist() == [6, 6, 9]


@pytest.mark.parametrize("norm", [True, False])
def test_trajectory_advantages_are_upstreams_but_for_rows_alone(norm):
    generator = np.random.default_rng(0)
    index, rewards = np.arange(30) % 5, torch.zeros(30, 4)
    rewards[:, 1:3] = torch.from_numpy(generator.random((30, 2))).float()
    index[0] = 9
    upstream, _ = compute_grpo_outcome_advantage(rewards, torch.ones(30, 1), index, norm_adv_by_std_in_grpo=norm)
    ours = trajectory_advantages(rewards, index, norm_adv_by_std_in_grpo=norm)
    torch.testing.assert_close(ours[1:], upstream[1:, 0], rtol=1e-5, atol=1e-6)
    assert ours[0] == 0 and upstream[0] != 0 and ours.dtype == rewards.dtype


def test_nodes_are_made_once_for_the_same_prompts(monkeypatch):
    made = []
    monkeypatch.setattr(module, "tree_nodes", lambda *args: made.append(0) or tree_nodes(*args))
    mask = torch.ones(IDS.shape)
    with SEGMENT_IDS.bound(IDS):
        assert batch_nodes(INDEX, mask) is batch_nodes(INDEX.copy(), mask) and len(made) == 1
        assert batch_nodes(INDEX[::-1], mask).parent.tolist() and len(made) == 2
    with SEGMENT_IDS.bound(IDS):
        batch_nodes(INDEX, mask)
    assert len(made) == 3
    with pytest.raises(RuntimeError, match="every token's segment_ids, which this trainer does not send"):
        batch_nodes(INDEX, mask)
