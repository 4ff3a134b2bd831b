"""TreePO's advantage by hand, against a slow version made of the rows' tokens, and where it has nothing to compare."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.recipe.compared import credit
from tests.trainer.ppo.credit.random_trees import random_batch

STRATEGIES = ["average", "group_size"]

advantage = partial(credit.advantage, "treepo", norm=False)
TWO_PAIRS = torch.tensor([[0, 1, -1], [0, 2, 3], [4, 5, -1], [4, 6, -1]])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("average", [3 / 8, -5 / 8, 1 / 8, 1 / 8]), ("group_size", [1 / 3, -2 / 3, 1 / 6, 1 / 6])],
)
def test_two_pairs_by_hand(strategy, expected):
    result = advantage([1, 0, 1, 1], TWO_PAIRS, ["a"] * 4, adv_weight_strategy=strategy)
    assert result[:, 0].tolist() == pytest.approx(expected)
    assert torch.equal(result, result[:, :1] * (TWO_PAIRS >= 0))
    normalized = advantage([1, 0, 1, 1], TWO_PAIRS, ["a"] * 4, norm=True, adv_weight_strategy=strategy)
    assert normalized[:, 0].tolist() == pytest.approx([x / 0.5 for x in expected], rel=1e-5)  # the group's deviation


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(6))
def test_against_a_slow_version(seed, strategy, norm):
    batch = random_batch(seed)
    result = advantage(
        batch.outcomes, batch.segment_ids, batch.index, batch.mask, norm=norm, adv_weight_strategy=strategy
    )
    for i, row in enumerate(batch.rows):
        group = [j for j in range(len(batch.rows)) if batch.index[j] == batch.index[i]]
        # the trajectories that are equal to this one up to some token; the same ones are one subtree
        subtrees = {tuple(j for j in group if batch.rows[j][:length] == row[:length]) for length in range(len(row) + 1)}
        values, weights = [], []
        for subtree in subtrees:
            if len(subtree) > 1:
                values.append(batch.outcomes[i] - batch.outcomes[list(subtree)].mean())
                weights.append(1 if strategy == "average" else len(subtree))
        expected = np.average(values, weights=weights)
        if norm:
            expected /= batch.outcomes[group].std(ddof=1) + 1e-6
        assert result[i].tolist() == pytest.approx((expected * batch.mask[i]).tolist(), abs=1e-9)
