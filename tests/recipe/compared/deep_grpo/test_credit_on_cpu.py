"""DEEP-GRPO's advantages against the paper's sum of two token means."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from recipe.compared.deep_grpo.tree import PIVOTS


def advantage(scores, pivots, mask, index, **keys) -> torch.Tensor:
    """(B, T); `scores` of rows, the rest of tokens."""
    pivots, mask = torch.tensor(pivots), torch.tensor(mask, dtype=torch.float)
    rewards = torch.zeros(mask.shape)
    rewards[:, -1] = torch.tensor(scores, dtype=torch.float)
    config = OmegaConf.create({"deep_grpo": keys})
    with PIVOTS.bound(pivots):
        return get_adv_estimator_fn("deep_grpo")(rewards, mask, np.array(index, dtype=object), config=config)[0]


@pytest.mark.parametrize("branch_weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_token_mean_is_the_papers_loss(seed, branch_weight):
    """Rows of three prompts with up to two pivots, tool tokens, and a loss that is any number for each token."""
    draws = np.random.default_rng(seed)
    n, width = 40, 9
    index, row_pivot = draws.integers(0, 3, n), draws.integers(0, 3, n)
    forked = draws.integers(0, width - 1, n)
    pivots = [[int(row_pivot[i] * (t >= forked[i])) for t in range(width)] for i in range(n)]
    mask, scores, losses = draws.random((n, width)) < 0.7, draws.random(n), torch.tensor(draws.normal(size=(n, width)))
    result = advantage(scores, pivots, mask, index, branch_weight=branch_weight)
    assert (result[torch.tensor(~mask)] == 0).all()
    means = {False: [], True: []}
    for i in range(n):
        rivals = [scores[j] for j in range(n) if index[j] == index[i] and row_pivot[j] == row_pivot[i]]
        for t in range(width):
            own = row_pivot[i] == 0 or t >= forked[i]
            if mask[i, t] and own:
                means[row_pivot[i] > 0].append((scores[i] - sum(rivals) / len(rivals)) * losses[i, t].item())
    expected = np.mean(means[False]) + branch_weight * np.mean(means[True])
    assert (result * losses)[torch.tensor(mask)].mean().item() == pytest.approx(expected, abs=1e-6)
