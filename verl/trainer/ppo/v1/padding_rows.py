"""Padding rows (`tag["is_padding"]`): rows without a trained token, which upstream adds to make a batch divisible.

Trees may have fewer trajectories than n, and an update takes `ppo_mini_batch_size` x n rows, so there may be nearly as
many padding rows as rows. They should cost nothing, and no update may consist only of padding rows: its mean over
tokens would be 0 / 0.
"""

from collections.abc import Sequence

import torch

from verl.workers.rollout.contexts import CONTEXTS


def is_padding_row(tag: dict) -> bool:
    """Return whether a row with this tag is a padding row."""
    return bool(tag.get("is_padding", False))


def clear_contexts(rows) -> None:
    """Take the contexts from a batch's padding rows, which upstream copies from a row; `rows` are its `BatchRows`."""
    padding_rows = sorted(set(range(len(rows))) - set(rows.real))
    if padding_rows and rows.column(CONTEXTS, padding_rows[:1]) is not None:
        rows.put(CONTEXTS, torch.zeros(len(padding_rows), 1, dtype=torch.int64), padding_rows)  # their number, 0


def spread_padding_rows(are_padding_rows: Sequence[bool], n_ranks: int, n_mini_batches: int) -> list[int]:
    """Return an order of rows in which the numbers of padding rows of two mini-batches differ by at most one.

    Rows stay on their ranks, and trajectories keep their order there. Upstream puts the padding rows of each rank at
    its end, that is, into the last mini-batches.

    >>> spread_padding_rows([False, False, True, True, False, False, True, False], n_ranks=2, n_mini_batches=2)
    [0, 2, 1, 3, 4, 6, 5, 7]

    `are_padding_rows` holds the rows of `n_ranks` data parallel ranks, of equal number, one rank after the other.
    """
    n_rows = len(are_padding_rows) - sum(are_padding_rows)
    if n_rows < n_mini_batches:
        raise ValueError(
            f"{n_rows} trajectories for {n_mini_batches} updates: one of them would have none. Raise "
            "data.train_batch_size, or ppo_mini_batch_size"
        )
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
    share of responses that reached `limit` (`data.max_response_length`).

    Upstream's `response_length/clip_ratio` is the share of responses as long as the longest one of the batch.
    """
    real = [tag for tag in tags if not is_padding_row(tag)]
    metrics["response_length/limit_ratio"] = sum(tag["response_len"] >= limit for tag in real) / len(real)
    share = sum(tag["prompt_len"] + tag["response_len"] for tag in real) / metrics["perf/total_num_tokens"]
    for name in ("perf/total_num_tokens", "perf/throughput"):
        metrics[name] *= share
