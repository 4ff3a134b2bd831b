"""IGPO's credit against a slow version on random batches."""

import math
import statistics

import numpy as np
import pytest
import torch

from recipe.compared.igpo.credit import compute_igpo_advantage
from verl.trainer.ppo.credit.nodes import SEGMENT_IDS
from verl.workers.rollout.answer_likelihood import ANSWER_GAINS

NAN = math.nan


def advantages_of(gains, rewards, mask, index, norm=True, **keys) -> torch.Tensor:
    config = {"norm_adv_by_std_in_grpo": norm, "igpo": keys}
    segments = torch.zeros_like(mask, dtype=torch.long)
    with ANSWER_GAINS.bound(gains), SEGMENT_IDS.bound(segments):
        return compute_igpo_advantage(rewards, mask, np.array(index), config=config)[0]


def slow(gains, rewards, mask, index, norm, gamma, epsilon=1e-6) -> torch.Tensor:
    """One token after the other."""

    def normalized(value: float, others: list[float]) -> float:
        if max(others) == min(others):
            return 0.0
        centered = value - statistics.mean(others)
        return centered / (statistics.stdev(others) + epsilon) if norm else centered

    n_rows, width = gains.shape
    of_row = [[g for g in gains[row].tolist() if not math.isnan(g)] for row in range(n_rows)]
    outcome = rewards.sum(-1).tolist()
    result = torch.zeros(n_rows, width)
    for row in range(n_rows):
        group = [i for i in range(n_rows) if index[i] == index[row]]
        turn = 0
        for at in range(width):
            value = gamma ** (len(of_row[row]) - turn) * normalized(outcome[row], [outcome[i] for i in group])
            for later in range(turn, len(of_row[row])):
                others = [of_row[i][later] for i in group if len(of_row[i]) > later]
                value += gamma ** (later - turn) * normalized(of_row[row][later], others)
            result[row, at] = value * mask[row, at]
            turn += not math.isnan(gains[row, at])
    return result


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 0.7, 0.0])
def test_random_batches(norm, gamma):
    draw = torch.Generator().manual_seed(int(10 * gamma) + norm)
    for _ in range(20):
        gains = torch.rand(7, 9, generator=draw, dtype=torch.float64) - 0.5
        gains[torch.rand(7, 9, generator=draw) < 0.7] = NAN
        gains[:, -1] = NAN
        mask = (torch.rand(7, 9, generator=draw) < 0.8).long()
        rewards = torch.zeros(7, 9, dtype=torch.float64)
        rewards[:, -1] = torch.randint(0, 2, (7,), generator=draw).double()
        index = ["a", "b", "a", "b", "a", "c", "b"]
        actual = advantages_of(gains, rewards, mask, index, norm=norm, gamma=gamma)
        torch.testing.assert_close(actual.float(), slow(gains, rewards, mask, index, norm, gamma), atol=1e-4, rtol=1e-4)
