"""The order of a batch's rows over ranks and mini-batches, and padding rows (`tag["is_padding"]`).

Upstream adds padding rows, which have no trained token, to make a batch divisible. Trees may have fewer trajectories
than n, and an update takes `ppo_mini_batch_size` x n rows, so there may be nearly as many padding rows as rows. They
should cost nothing, and no update may consist only of padding rows: its mean over tokens would be 0 / 0.
"""

from collections.abc import Sequence

import numpy as np
import torch

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS
from verl.trainer.ppo.v1.batch_rows import BatchRows, is_padding_row
from verl.workers.rollout.contexts import CONTEXTS


def clear_contexts(rows: BatchRows) -> None:
    """Take the contexts from a batch's padding rows, which upstream copies from a row."""
    padding_rows = sorted(set(range(len(rows))) - set(rows.real))
    if padding_rows and rows.column(CONTEXTS, padding_rows[:1]) is not None:
        rows.put(CONTEXTS, torch.zeros(len(padding_rows), 1, dtype=torch.int64), padding_rows)  # their number, 0


def check_updates(n_trajectories: int, n_mini_batches: int) -> None:
    """Raise ValueError if an update would have only padding rows."""
    if n_trajectories < n_mini_batches:
        sizes = "data.train_batch_size, or ppo_mini_batch_size"
        raise ValueError(
            f"{n_trajectories} trajectories for {n_mini_batches} updates: one would have none; raise {sizes}"
        )


def spread_padding_rows(are_padding_rows: Sequence[bool], n_ranks: int, n_mini_batches: int) -> list[int]:
    """Return an order of rows in which the numbers of padding rows of two mini-batches differ by at most one.

    Rows stay on their ranks, and trajectories keep their order there. Upstream puts the padding rows of each rank at
    its end, that is, into the last mini-batches.

    >>> spread_padding_rows([False, False, True, True, False, False, True, False], n_ranks=2, n_mini_batches=2)
    [0, 2, 1, 3, 4, 6, 5, 7]

    `are_padding_rows` holds the rows of `n_ranks` data parallel ranks, of equal number, one rank after the other.
    """
    rows_per_rank, order, dealt = len(are_padding_rows) // n_ranks, [], 0
    size = rows_per_rank // n_mini_batches
    for start in range(0, len(are_padding_rows), rows_per_rank):
        own = range(start, start + rows_per_rank)
        padding_rows = [row for row in own if are_padding_rows[row]]
        rows = iter([row for row in own if not are_padding_rows[row]])
        for part in range(n_mini_batches):
            here = padding_rows[(part - dealt) % n_mini_batches :: n_mini_batches]
            order += [next(rows) for _ in range(size - len(here))] + here
        dealt += len(padding_rows)
    return order


def correct_counts(metrics: dict, tags: Sequence[dict], limit: int) -> None:
    """Remove padding rows from a step's number of tokens and its throughput, and add `response_length/limit_ratio`, the
    share of responses that reached `limit` (upstream's `clip_ratio`: as long as the longest one of the batch)."""
    real = [tag for tag in tags if not is_padding_row(tag)]
    metrics["response_length/limit_ratio"] = sum(tag["response_len"] >= limit for tag in real) / len(real)
    share = sum(tag["prompt_len"] + tag["response_len"] for tag in real) / metrics["perf/total_num_tokens"]
    for name in ("perf/total_num_tokens", "perf/throughput"):
        metrics[name] *= share


def place_groups(
    groups: Sequence[Sequence[int]],
    tokens: Sequence[int],
    padding_rows: Sequence[int],
    n_ranks: int,
    n_mini_batches: int,
) -> list[int]:
    """Return an order of the rows, by rank and within a rank by mini-batch, in which groups stay whole in a rank's
    mini-batch, where shared tokens are computed once.

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
