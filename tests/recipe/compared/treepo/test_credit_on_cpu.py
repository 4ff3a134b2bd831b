"""TreePO's advantage against a slow version made of the rows' tokens."""

from functools import partial

import numpy as np
import pytest

from tests.recipe.compared import credit
from tests.trainer.ppo.credit.random_trees import random_batch

STRATEGIES = ["average", "group_size"]

advantage = partial(credit.advantage, "treepo", norm=False)


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
