"""BranPO grows new tails of failed trajectories and of long right ones; its advantages against a slow version."""

import math
import random
from functools import partial
from statistics import fmean

import numpy as np
import pytest

from recipe.compared.branpo.tree import BranPOKeys, Policy, new_tails
from tests.recipe.compared import credit
from tests.recipe.compared.engines import grown_by, letter, odd, scoring
from tests.workers.rollout.toy_engine import HashEngine, Letters


def grown(engine, seed):
    """The tree, and the trajectories that were scored."""
    keys = BranPOKeys(step_delimiter="c")
    score, scored = scoring(odd)
    return grown_by(Policy(keys, letter), engine, keys.bases + keys.tails, score=score, seed=seed), scored


# ---- which trajectories get new tails ----


@pytest.mark.parametrize(("rewards", "expected"), [([1.0] * 4, 0), ([0.0] * 4, 8), ([0.1] * 4, 0)])
def test_all_alike(rewards, expected):
    assert len(new_tails(BranPOKeys(), [1, 2, 3, 4], rewards, seed=0)) == expected
    assert len(new_tails(BranPOKeys(failure_threshold=0.1), [1, 2, 3, 4], rewards, 0)) == (8 if rewards[0] < 1 else 0)


@pytest.mark.parametrize("seed", range(30))
def test_new_tails_against_a_slow_version(seed):
    draws = random.Random(seed)
    n = draws.randint(1, 8)
    lengths, rewards = [draws.randint(1, 6) for _ in range(n)], [float(draws.random() < 0.6) for _ in range(n)]
    keys = BranPOKeys(bases=n, tails=draws.randint(1, 12), failed_tries=draws.randint(1, 3), long_tries=3)
    expected = []
    for i in range(n):
        if rewards[i] == 0:
            expected += [(i, None)] * keys.failed_tries
    if n < 2 * sum(rewards) < 2 * n:
        right_lengths = [lengths[i] for i in range(n) if rewards[i]]
        for i in range(n):
            if rewards[i] and lengths[i] > sum(right_lengths) / len(right_lengths):
                expected += [(i, 2)] * 3
    tails = new_tails(keys, lengths, rewards, seed)
    assert [(i, 2 if rewards[i] else None) for i, _ in tails] == expected[: keys.tails]
    assert tails == [(i, back) for i, back in tails if not rewards[i] or back == 2]


def test_the_step_from_which_a_failed_one_goes_on_is_drawn_alike_from_the_last_three():
    drawn = [new_tails(BranPOKeys(bases=1), [9], [0.0], seed)[0][1] for seed in range(3000)]
    assert {drawn.count(back) // 100 for back in (1, 2, 3)} <= {9, 10} and set(drawn) == {1, 2, 3}


# ---- the tree ----


def ends_of_steps(text):
    return sorted({at + 1 for at in range(len(text)) if text[at] == "c"} | {len(text)})


@pytest.mark.parametrize("seed", range(8))
def test_tails_go_on_from_a_few_steps_before_the_end(seed):
    engine = HashEngine(sharpness=1.5, memory=100)
    tree, scored = grown(engine, seed)
    rows, ids = tree.trajectories(), tree.segment_ids()
    assert scored == rows[:4] and len(engine.asked) == 12 == len({request.seed for request in engine.asked})
    steps = [[0, *ends_of_steps(Letters().decode(row))] for row in scored]
    rewards = [odd(row) for row in scored]
    right = [len(of_row) - 1 for of_row, reward in zip(steps, rewards, strict=True) if reward]
    forks = []
    for i, of_row in enumerate(steps):
        if not rewards[i]:
            forks += [(i, {of_row[max(0, len(of_row) - 1 - back)] for back in (1, 2, 3)})] * 2
    if 2 < sum(rewards) < 4:
        for i, of_row in enumerate(steps):
            if rewards[i] and len(of_row) - 1 > fmean(right):
                forks += [(i, {of_row[max(0, len(of_row) - 3)]})] * 5
    forks = forks[:8]
    assert tree.metrics["new_tails"] == len(forks)
    for row in range(4, 12):
        shared = [sum(a == b for a, b in zip(ids[row], ids[i], strict=False)) for i in range(4)]
        if row - 4 < len(forks):
            base, allowed = forks[row - 4]
            assert shared[base] in allowed and rows[row][: shared[base]] == rows[base][: shared[base]]
            assert sum(shared) == shared[base]
        else:
            assert shared == [0] * 4, "the others start from the prompt"


EPSILON = 1e-6

advantage = partial(credit.advantage, "branpo")


def test_rows_without_a_token_are_bases_of_their_own():
    rows = advantage([1.0, 0.0, 1.0, 5.0], [[-1]] * 4, [0, 0, 0, 1], [[1], [1], [0], [0]], norm=False)
    assert rows[:, 0].tolist() == pytest.approx([1 / 3, -2 / 3, 0, 0])


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
