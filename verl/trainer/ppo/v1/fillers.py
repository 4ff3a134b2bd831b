"""Rows without a trained token, which upstream adds to a batch where its size must divide (`tag["is_padding"]`).

Trees may have fewer trajectories than n, and an update takes `ppo_mini_batch_size` x n rows, so there may be nearly as
many fillers as rows. They should cost nothing, and no update may consist of them alone: its mean over tokens would be
0 / 0.
"""

from collections.abc import Sequence

from verl.trainer.ppo import padding_utils

# a token of a prompt and one of a response: what the shortest sequence has
FILLER_TOKENS = 2


def is_filler(tag: dict) -> bool:
    return bool(tag.get("is_padding", False))


def shorten_fillers() -> None:
    """Fillers of two tokens instead of 128, for verl 0.9.1, which reads this constant whenever it makes them.

    Upstream's are computed in every pass, like any row.
    """
    padding_utils.SYNTHETIC_PADDING_SEQ_LEN = FILLER_TOKENS


def spread_fillers(are_fillers: Sequence[bool], n_ranks: int, n_mini_batches: int) -> list[int]:
    """Where each row comes from, so that all mini-batches have as many fillers, give or take one.

    Rows stay on their ranks, and trajectories keep their order there. Upstream's order has the fillers of each rank at
    its end, that is, in the last mini-batches.

    >>> spread_fillers([False, False, True, True, False, False, True, False], n_ranks=2, n_mini_batches=2)
    [0, 2, 1, 3, 4, 6, 5, 7]

    Args:
        are_fillers: of each row, first those of the first rank.
        n_ranks: data parallel ranks, which have equally many rows.
        n_mini_batches: each rank's rows are cut into so many equal parts, one after another.

    Raises:
        ValueError: there are fewer rows than mini-batches.
    """
    n_rows = len(are_fillers) - sum(are_fillers)
    if n_rows < n_mini_batches:
        raise ValueError(
            f"{n_rows} trajectories for {n_mini_batches} updates: one of them would have none. Raise "
            "data.train_batch_size, or ppo_mini_batch_size"
        )
    of_rank, order, dealt = len(are_fillers) // n_ranks, [], 0
    size = of_rank // n_mini_batches
    for start in range(0, len(are_fillers), of_rank):
        own = range(start, start + of_rank)
        fillers = [row for row in own if are_fillers[row]]
        rows = iter([row for row in own if not are_fillers[row]])
        for part in range(n_mini_batches):
            here = fillers[(part - dealt) % n_mini_batches :: n_mini_batches]
            order += [next(rows) for _ in range(size - len(here))] + here
        dealt += len(fillers)
    return order


def correct_counts(metrics: dict, tags: Sequence[dict], limit: int) -> None:
    """Take fillers out of a step's counts of tokens, and add the share of responses that reached the limit.

    Upstream's `response_length/clip_ratio` is the share of responses as long as the longest one of the batch.

    Args:
        metrics: of the step; changed in place.
        tags: of the batch's rows.
        limit: `data.max_response_length` in tokens.
    """
    real = [tag for tag in tags if not is_filler(tag)]
    metrics["response_length/limit_ratio"] = sum(tag["response_len"] >= limit for tag in real) / len(real)
    share = sum(tag["prompt_len"] + tag["response_len"] for tag in real) / metrics["perf/total_num_tokens"]
    for name in ("perf/total_num_tokens", "perf/throughput"):
        metrics[name] *= share
