"""CURE's advantage by hand, against a slow version made of the rows' tokens, and whatever the order of the rows."""

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from tests.trainer.ppo.credit.random_trees import random_batch
from verl.trainer.ppo.credit.nodes import SEGMENT_IDS


def advantage(scores, segment_ids, index, mask=None, norm=False) -> torch.Tensor:
    mask = (segment_ids >= 0).double() if mask is None else mask
    rewards = torch.zeros(segment_ids.shape, dtype=torch.float64)
    rewards[:, 0] = torch.as_tensor(scores, dtype=torch.float64)
    config = {"norm_adv_by_std_in_grpo": norm}
    with SEGMENT_IDS.bound(segment_ids):
        return get_adv_estimator_fn("cure")(rewards, mask, np.array(index, dtype=object), config=config)[0]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_response_and_a_continuation_by_hand(order):
    """The trainer sorts rows by their lengths: the response is the first trajectory, wherever its row is."""
    ids = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 2, 2]])
    expected = torch.tensor([[0.5] * 5, [0, 0, 0, -0.5, -0.5]], dtype=torch.float64)
    result = advantage(np.array([1, 0])[order], ids[order], ["a", "a"])
    assert torch.equal(result, expected[order])
    normalized = advantage(np.array([1, 0])[order], ids[order], ["a", "a"], norm=True)
    assert torch.allclose(normalized, expected[order] / 0.5**0.5, rtol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_against_a_slow_version(seed, norm):
    batch = random_batch(seed)
    result = advantage(batch.outcomes, batch.segment_ids, batch.index, batch.mask, norm)
    for i, row in enumerate(batch.rows):
        group = [j for j in range(len(batch.rows)) if batch.index[j] == batch.index[i]]
        expected = batch.outcomes[i] - batch.outcomes[group].mean()
        if norm:
            expected /= batch.outcomes[group].std(ddof=1) + 1e-6
        for position in range(result.shape[1]):
            places = [batch.place[j] for j in group if batch.rows[j][: position + 1] == row[: position + 1]]
            is_first = position < len(row) and batch.place[i] == min(places)
            value = expected * batch.mask[i, position].item() if is_first else 0
            assert result[i, position].item() == pytest.approx(value, abs=1e-9)


def test_rows_without_a_tree_are_compared_with_their_group():
    without = torch.full((3, 2), -1)
    plain = advantage([2, 0, 7], without, ["a", "a", "b"], mask=torch.ones(3, 2))
    assert plain.tolist() == [[1, 1], [-1, -1], [0, 0]], "without trees it is GRPO"
