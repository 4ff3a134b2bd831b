"""Proposes thresholds at which a model's lookahead trees open enough branches (scripts/explore.sh).

With p1 and p2 the highest probabilities of a step, LATR opens a branch where p2 > prob_filter_abs_thres and
p1 - p2 < prob_filter_rel_thres. The published thresholds fit the paper's models, not every model and task.
"""

import math

import numpy as np

from verl.evaluation.exploration.table import Proposal, SampledGroup, Samples
from verl.utils.parts import register_proposal

HALVINGS = 30


@register_proposal("latr")
def latr_thresholds(samples: Samples) -> Proposal:
    """Return the strictest LATR thresholds at which the median tree is expected to open n branches or more. Dropped
    branches, and greedy tokens that are surer than samples, cost some of them.

    For a level u in [0, 1], prob_filter_rel_thres is the u-quantile of p1 - p2 over all steps, prob_filter_abs_thres is
    the (1 - u)-quantile of p2. Bisection finds the smallest u with enough branches (`expected_branches`). The tree
    takes the most likely tokens, so samples at a low temperature resemble it most.
    """
    tables = [probabilities(group) for group in samples.coldest]
    seconds_S, gaps_S = (np.concatenate([table[i][~np.isnan(table[i])] for table in tables]) for i in (0, 1))

    def thresholds(level: float) -> tuple[float, float]:
        return float(np.quantile(seconds_S, 1 - level)), float(np.quantile(gaps_S, level))

    def expected(absolute: float, relative: float) -> float:
        return float(np.median([expected_branches(*table, absolute, relative) for table in tables]))

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if expected(*thresholds(middle)) >= samples.n else (middle, high)
    # Round to the looser side, so that steps exactly at the quantiles pass.
    absolute, relative = (rounded(value, up) for value, up in zip(thresholds(high), (False, True), strict=True))
    return Proposal(
        {"kt.prob_filter_abs_thres": absolute, "kt.prob_filter_rel_thres": relative},
        f"half of the prompts are expected to open {expected(absolute, relative):.1f} branches or more",
    )


def probabilities(group: SampledGroup) -> tuple[np.ndarray, np.ndarray]:
    """Return p2 and p1 - p2 of the steps of a prompt's N trajectories, both (N, T); NaN where there is no step."""
    shape = len(group.trajectories), max(len(row.tokens) for row in group.trajectories)
    seconds_NT, gaps_NT = np.full(shape, np.nan), np.full(shape, np.nan)
    for i, row in enumerate(group.trajectories):
        for at, step in enumerate(row.steps):
            if step is not None:
                seconds_NT[i, at], gaps_NT[i, at] = step.second, step.first - step.second
    return seconds_NT, gaps_NT


def expected_branches(seconds_NT: np.ndarray, gaps_NT: np.ndarray, absolute: float, relative: float) -> float:
    """Return the expected number of rows at the end of a prompt's tree if no row is dropped and n does not limit them.

    At each position the number of rows is multiplied by 1 + s, where s is the share of all samples that have a step
    there which passes both thresholds.
    """
    passes_NT = (seconds_NT > absolute) & (gaps_NT < relative)  # NaN never passes.
    return float(np.prod(1 + passes_NT.mean(0)))


def rounded(value: float, up: bool) -> float:
    """Return a share rounded up or down to two significant digits."""
    if value <= 0:
        return 0.0
    digits = 1 - math.floor(math.log10(value))
    scaled = value * 10**digits
    return min(1.0, round((math.ceil(scaled) if up else math.floor(scaled)) / 10**digits, digits))
