"""Computes the bootstrap of upstream's validation at once instead of response by response, with equal figures.

verl 0.9.1 calls a Python function 1,000 times for each of best@k, worst@k and maj@k of each problem and each number
that the reward returns, while nothing else runs. This can go when upstream computes with arrays there.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np


def compute_at_once(metric_utils: ModuleType) -> None:
    """Replace `bootstrap_metric`, which `process_validation_metrics` calls."""
    metric_utils.bootstrap_metric = bootstrap_metric


def bootstrap_metric(
    data: Sequence[Any], subset_size: int, reduce_fns: Sequence[Callable], n_bootstrap: int = 1000, seed: int = 42
) -> list[tuple[float, float]]:
    """Return (mean, standard deviation) over `n_bootstrap` samples of `subset_size` elements for each reduction.

    Reductions are `np.max` and `np.min` of numbers, and upstream's majority vote (a `partial` of `calc_maj_val`): the
    first value with the most frequent vote, the first one of equally frequent votes.
    """
    np.random.seed(seed)
    drawn = np.random.choice(len(data), size=(n_bootstrap, subset_size), replace=True)
    results = []
    for reduce_fn in reduce_fns:
        if reduce_fn in (np.max, np.min):
            values = reduce_fn(np.array(data, dtype=np.float64)[drawn], axis=1)
        else:
            vote, value = reduce_fn.keywords["vote_key"], reduce_fn.keywords["val_key"]
            numbers: dict[Any, int] = {}
            votes = np.array([numbers.setdefault(each[vote], len(numbers)) for each in data])[drawn]
            first = (votes[:, :, None] == votes[:, None, :]).sum(-1).argmax(1)
            values = np.array([each[value] for each in data], dtype=np.float64)[drawn[range(n_bootstrap), first]]
        results.append((float(np.mean(values)), float(np.std(values))))
    return results
