"""BranPO's advantages against a slow version."""

import math
from functools import partial

import numpy as np
import pytest

from tests.recipe.compared import credit

EPSILON = 1e-6

advantage = partial(credit.advantage, "branpo")


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_against_a_slow_version(seed, norm):
    """Three prompts; each base has one to three tails, with one to three steps each, and tokens of tools."""
    draws = np.random.default_rng(seed)
    rows, ids, mask = [], [], []
    for base in range(12):
        n_shared = int(draws.integers(1, 3))
        n_tails = int(draws.integers(1, 4))
        for tail in range(n_tails):
            n_steps = int(draws.integers(1, 4))
            own = [1000 * base + 100 * (tail + 1) + step for step in range(n_steps) for _ in range(2)]
            rows.append({"prompt": base % 3, "base": base, "steps": n_steps, "tails": n_tails})
            rows[-1] |= {"shared": n_shared, "first": tail == 0, "score": float(draws.integers(0, 3)) / 2}
            ids.append([1000 * base] * n_shared + own)
            mask.append([1] * n_shared + [1, int(draws.random() < 0.5)] * n_steps)
    width = max(map(len, ids))
    ids = [row + [-1] * (width - len(row)) for row in ids]
    mask = [row + [0] * (width - len(row)) for row in mask]
    fast = advantage([row["score"] for row in rows], ids, [row["prompt"] for row in rows], mask, norm)
    for row, tokens, own_mask, result in zip(rows, ids, mask, fast, strict=True):
        of_prompt = [other for other in rows if other["prompt"] == row["prompt"]]
        tails = {b: [o["score"] for o in of_prompt if o["base"] == b] for b in {o["base"] for o in of_prompt}}
        values = {base: sum(scores) / len(scores) for base, scores in tails.items()}
        mean = sum(values.values()) / len(values)
        squares = sum((o["score"] - mean) ** 2 / o["tails"] for o in of_prompt)
        std_tails = math.sqrt(squares / (len(values) - 1)) + EPSILON
        std_bases = math.sqrt(sum((v - mean) ** 2 for v in values.values()) / (len(values) - 1)) + EPSILON
        of_base = (values[row["base"]] - mean) / (std_bases if norm else 1)
        of_tail = (row["score"] - mean) / (std_tails if norm else 1)
        rivals = [o["steps"] for o in of_prompt if o["base"] == row["base"] and o["score"] == row["score"]]
        # a row alone is a tail from its first token on, whose shared part is a step more
        if row["steps"] > min(rivals):
            of_tail = min(of_tail, 0.0)
        for t in range(width):
            shared = t < row["shared"] and row["tails"] > 1
            expected = (of_base if row["first"] else 0.0) if shared else of_tail
            assert result[t].item() == pytest.approx(expected * own_mask[t], abs=1e-5), (row, t, tokens)
