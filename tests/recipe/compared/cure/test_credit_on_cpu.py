"""CURE's advantage against a slow version made of the rows' tokens."""

from functools import partial

import pytest

from tests.recipe.compared import credit
from tests.trainer.ppo.credit.random_trees import random_batch

advantage = partial(credit.advantage, "cure", norm=False)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_against_a_slow_version(seed, norm):
    batch = random_batch(seed)
    result = advantage(batch.outcomes, batch.segment_ids, batch.index, batch.mask, norm=norm)
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
