"""Orders a batch's rows so that groups stay whole in a rank's mini-batch, where shared tokens are computed once."""

from collections.abc import Sequence

import numpy as np

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS
from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.workers.rollout.contexts import CONTEXTS


def place_groups(
    groups: Sequence[Sequence[int]],
    tokens: Sequence[int],
    padding_rows: Sequence[int],
    n_ranks: int,
    n_mini_batches: int,
) -> list[int]:
    """Return the order of the rows, sorted by rank and within a rank by mini-batch.

    `groups` holds the row numbers of each group, `tokens` the number of its distinct tokens; `padding_rows` belong to
    none. Every rank has equally many rows in every mini-batch. The heaviest groups are placed first, each where the
    fewest tokens are; a group is split only if no place for all its rows is left. The numbers of padding rows of two
    mini-batches differ by at most one.

    >>> place_groups([[0, 1], [2, 3], [4, 5], [6, 7]], [9, 2, 3, 8], [], n_ranks=2, n_mini_batches=1)
    [0, 1, 2, 3, 6, 7, 4, 5]
    """
    n_cells = n_ranks * n_mini_batches
    size = (sum(map(len, groups)) + len(padding_rows)) // n_cells
    cells: list[list[int]] = [[] for _ in range(n_cells)]
    # Deal the padding rows one by one to the cells; a cell is one mini-batch of one rank.
    padding_rows_of = [list(padding_rows[cell::n_cells]) for cell in range(n_cells)]
    free = [size - len(own) for own in padding_rows_of]
    load = [0.0] * n_cells

    def put(cell: int, rows: Sequence[int], weight: float) -> None:
        cells[cell].extend(rows)
        free[cell] -= len(rows)
        load[cell] += weight

    left = []
    for group in sorted(range(len(groups)), key=lambda group: -tokens[group]):
        rows = groups[group]
        fitting = [cell for cell in range(n_cells) if free[cell] >= len(rows)]
        if fitting:
            put(min(fitting, key=load.__getitem__), rows, tokens[group])
        else:
            left.append(group)
    for group in left:
        rows, share = list(groups[group]), tokens[group] / len(groups[group])
        while rows:
            cell = max(range(n_cells), key=lambda cell: (free[cell], -load[cell]))
            taken, rows = rows[: free[cell]], rows[free[cell] :]
            put(cell, taken, share * len(taken))
    return [row for cell in range(n_cells) for row in cells[cell] + padding_rows_of[cell]]


def distinct_tokens(rows: BatchRows, group: Sequence[int]) -> int:
    """Return the number of a group's distinct tokens: the prompt and each segment count once, and each row's contexts.
    Without segment ids every response counts whole."""
    segments = rows.column(SEGMENT_IDS.name, group)
    prompt = max(rows.tags[row]["prompt_len"] for row in group)
    if segments is None:
        return prompt + sum(rows.tags[row]["response_len"] for row in group)
    n_segments = int(max(ids.max() for ids in segments)) + 1
    # a token without segment has id -1
    lengths = [np.bincount(ids.numpy() + 1, minlength=n_segments + 1) for ids in segments]
    contexts = rows.column(CONTEXTS, group) or ()
    return prompt + int(np.max(lengths, axis=0).sum()) + sum(map(len, contexts))
