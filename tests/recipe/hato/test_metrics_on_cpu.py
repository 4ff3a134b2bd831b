"""Diversity and novelty of right answers, by hand and against a slow edit distance."""

import random
from itertools import product

import pytest

from recipe.hato.metrics import ReferencePaths, evenly_spaced, novelty, rdi


def slow_distance(a, b) -> float:
    """Levenshtein by the recurrence, over the longer length."""
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i, j in product(range(1, len(a) + 1), range(1, len(b) + 1)):
        change = table[i - 1, j - 1] + (a[i - 1] != b[j - 1])
        table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, change)
    return table[len(a), len(b)] / max(len(a), len(b), 1)


def test_rdi_by_hand():
    assert rdi([[1, 2, 3, 4], [1, 2, 3, 5], [9, 9, 9, 9]]) == pytest.approx((1 / 4 + 1 / 4 + 1) / 3)
    assert rdi([[1, 2], [1, 2], [3, 4], [3, 4]]) == 0.0
    assert rdi([[1, 2]]) is None and rdi([]) is None


@pytest.mark.parametrize("seed", range(10))
def test_rdi_and_novelty_against_the_slow_reference(seed):
    rng = random.Random(seed)
    paths, references = ([[rng.randrange(4) for _ in range(rng.randrange(1, 9))] for _ in range(6)] for _ in range(2))
    others = [[slow_distance(a, b) for j, b in enumerate(paths) if j != i] for i, a in enumerate(paths)]
    assert rdi(paths) == pytest.approx(sum(map(min, others)) / 6)
    nearest = [min(slow_distance(a, b) for b in references) for a in paths]
    assert novelty(paths, references) == pytest.approx(sum(nearest) / 6)


def test_of_many_paths_evenly_spaced_ones_are_compared():
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced(range(3), 4) == [0, 1, 2]
    assert rdi([[i] * 8 for i in range(1000)]) == 1.0


def test_reference_paths_are_the_first_ones_and_bounded():
    references = ReferencePaths(max_problems=2, max_paths=2)
    references.keep("none yet", [])
    references.keep("a", [[1], [2], [3]])
    references.keep("a", [[4]])
    references.keep("b", [[5]])
    references.keep("c", [[6]])
    assert (references.of("a"), references.of("b"), references.of("c")) == ([[1], [2]], [[5]], [])
    again = ReferencePaths(2, 2)
    again.load_state_dict(references.state_dict())
    assert again.of("a") == [[1], [2]]
