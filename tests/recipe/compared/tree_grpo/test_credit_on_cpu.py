"""Tree-GRPO's advantage against a slow version."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.recipe.compared import credit

advantage = partial(credit.advantage, "tree_grpo")


@pytest.mark.parametrize("seed", range(4))
def test_against_a_slow_version(seed):
    generator = np.random.default_rng(seed)
    trees, index = generator.integers(0, 4, 40), generator.integers(0, 4, 40)
    scores = generator.random(40).astype(np.float32)
    # the tree's first segment, then the row's own
    ids = torch.stack([torch.from_numpy(trees), torch.arange(40) + 100], dim=1)
    fast = advantage(scores.tolist(), ids, index.tolist())
    for i in range(40):
        expected = 0.0
        for members in (
            [j for j in range(40) if index[j] == index[i]],
            [j for j in range(40) if index[j] == index[i] and trees[j] == trees[i]],
        ):
            if len(members) > 1:
                expected += (scores[i] - scores[members].mean()) / scores[members].std(ddof=1)
        assert fast[i].tolist() == pytest.approx([expected] * 2, abs=1e-3)
