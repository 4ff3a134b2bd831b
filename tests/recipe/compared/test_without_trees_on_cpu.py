"""The credits of trees compare rows that are in no tree with their group."""

import pytest
import torch

from tests.recipe.compared.credit import advantage


@pytest.mark.parametrize("name", ["branpo", "cure", "tree_grpo", "treepo"])
def test_rows_without_a_tree_are_compared_with_their_group(name):
    without = torch.full((3, 2), -1)
    plain = advantage(name, [2, 0, 7], without, ["a", "a", "b"], mask=torch.ones(3, 2), norm=False)
    assert plain.tolist() == [[1, 1], [-1, -1], [0, 0]]
