"""Tree-GRPO's advantage by hand, against a slow version, and where it has nothing to compare."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.recipe.compared import credit

advantage = partial(credit.advantage, "tree_grpo")


def test_two_trees_by_hand():
    """Trees {3, 1} and {0, 0} of one prompt: against the tree's mean 2 and 0, and against the prompt's mean 1."""
    ids = torch.tensor([[0, 1], [0, 2], [3, 4], [3, -1]])
    plain = advantage([3, 1, 0, 0], ids, ["a"] * 4, norm=False)
    assert plain.tolist() == [[3, 3], [-1, -1], [-1, -1], [-1, 0]]
    of_tree, of_prompt = math.sqrt(2), math.sqrt(2)  # standard deviations: of 3, 1, and of 3, 1, 0, 0
    both = advantage([3, 1, 0, 0], ids, ["a"] * 4)
    expected = [1 / of_tree + 2 / of_prompt, -1 / of_tree, -1 / of_prompt, -1 / of_prompt]
    assert both[:, 0].tolist() == pytest.approx(expected, rel=1e-5)


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
