"""Where rows go if shared tokens are computed once: equal parts, whole groups, even loads, spread padding rows."""

import random

import pytest
import torch

from verl.trainer.ppo.v1.row_order import distinct_tokens, place_groups
from verl.workers.rollout.contexts import CONTEXTS


def parts_of(order: list[int], n_parts: int) -> list[list[int]]:
    size = len(order) // n_parts
    return [order[start : start + size] for start in range(0, len(order), size)]


def test_the_example_of_the_docstring():
    order = place_groups([[0, 1], [2, 3], [4, 5], [6, 7]], [9, 2, 3, 8], [], n_ranks=2, n_mini_batches=1)
    assert order == [0, 1, 2, 3, 6, 7, 4, 5]


@pytest.mark.parametrize("seed", range(100))
def test_groups_of_one_size_stay_whole_and_ranks_are_even(seed):
    rng = random.Random(seed)
    n, n_ranks, n_mini_batches, per_part = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 6)
    n_parts = n_ranks * n_mini_batches
    groups = [list(range(start, start + n)) for start in range(0, n_parts * per_part * n, n)]
    tokens = [rng.randint(1, 100) for _ in groups]
    order = place_groups(groups, tokens, [], n_ranks, n_mini_batches)
    assert sorted(order) == list(range(len(order)))
    loads = []
    for part in parts_of(order, n_parts):
        whole = {row // n for row in part}
        assert len(whole) == per_part and sorted(part) == sorted(row for group in whole for row in groups[group])
        loads.append(sum(tokens[group] for group in whole))
    if per_part > 1:
        assert max(loads) - min(loads) <= max(tokens) * (1 if per_part > 2 else 2)


@pytest.mark.parametrize("seed", range(100))
def test_groups_of_any_size_and_padding_rows(seed):
    rng = random.Random(seed)
    n_ranks, n_mini_batches, size = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 9)
    n_rows = n_ranks * n_mini_batches * size
    rows = list(range(n_rows))
    padding_rows = sorted(rng.sample(rows, rng.randint(0, n_ranks * size - 1)))
    real = [row for row in rows if row not in padding_rows]
    groups: list[list[int]] = []
    while real:
        length = rng.randint(1, 6)
        groups.append(real[:length])
        real = real[length:]
    order = place_groups(groups, [len(group) for group in groups], padding_rows, n_ranks, n_mini_batches)
    assert sorted(order) == rows
    parts = parts_of(order, n_ranks * n_mini_batches)
    mini_batches = [sum(parts[number::n_mini_batches], []) for number in range(n_mini_batches)]
    of_mini_batch = [sum(row in padding_rows for row in mini_batch) for mini_batch in mini_batches]
    assert max(of_mini_batch) - min(of_mini_batch) <= 1
    place = {row: number for number, part in enumerate(parts) for row in part}
    cut = sum(len({place[row] for row in group}) - 1 for group in groups)
    assert cut <= len(parts) - 1  # each part but one is filled up by a cut group at most


class Rows:
    """Stands for `BatchRows`: a prompt of five tokens, responses of three, four and four."""

    tags = [{"prompt_len": 5, "response_len": length} for length in (3, 4, 4)]

    def __init__(self, segments: list[list[int]] | None):
        self.segments = segments

    def column(self, name: str, chosen: list[int]):
        if name == CONTEXTS:
            return None
        return None if self.segments is None else [torch.tensor(self.segments[row]) for row in chosen]


def test_distinct_tokens_by_hand():
    """Rows 0 and 1 share two tokens, row 2 shares none."""
    rows = Rows([[0, 0, 1], [0, 0, 2, 2], [3, 3, 3, 3]])
    assert distinct_tokens(rows, [0, 1]) == 5 + 2 + 1 + 2
    assert distinct_tokens(rows, [0, 1, 2]) == 5 + 2 + 1 + 2 + 4
    assert distinct_tokens(Rows(None), [0, 1, 2]) == 5 + 3 + 4 + 4
