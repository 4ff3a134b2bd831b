"""Proposes, from plain samples, thresholds at which a model's trees fork often enough to grow all their trajectories.

With p1 and p2 the highest probabilities of a step, LATR opens a branch where p2 > prob_filter_abs_thres and
p1 - p2 < prob_filter_rel_thres. ARPO's policy `threshold` forks where the entropy after a tool's result is above
entropy_weight times that after the prompt. The published thresholds fit the papers' models, not every model and task.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from verl.evaluation.exploration.table import Group, Step, Trajectory

HALVINGS = 30


class Proposal(NamedTuple):
    """Keys under actor_rollout_ref.rollout with their values, and their expected effect in words."""

    values: dict[str, float | str]
    expected: str

    def line(self) -> str:
        """Return the Hydra overrides that set the keys."""
        return " ".join(f"actor_rollout_ref.rollout.{key}={value}" for key, value in self.values.items())


def latr_thresholds(groups: Sequence[Group], branches: float) -> Proposal:
    """Return the strictest LATR thresholds at which the median tree is expected to open at least `branches` branches.

    For a level u in [0, 1], prob_filter_rel_thres is the u-quantile of p1 - p2 over all steps, prob_filter_abs_thres is
    the (1 - u)-quantile of p2. Bisection finds the smallest u with enough branches (`expected_branches`).

    Args:
        groups: plain samples. The tree takes the most likely tokens, so samples at a low temperature resemble it most.
        branches: number of branches a tree should open; ask for more than it can hold if branches are dropped.
    """
    tables = [probabilities(group) for group in groups]
    seconds_S, gaps_S = (np.concatenate([table[i][~np.isnan(table[i])] for table in tables]) for i in (0, 1))

    def thresholds(level: float) -> tuple[float, float]:
        return float(np.quantile(seconds_S, 1 - level)), float(np.quantile(gaps_S, level))

    def expected(absolute: float, relative: float) -> float:
        return float(np.median([expected_branches(*table, absolute, relative) for table in tables]))

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if expected(*thresholds(middle)) >= branches else (middle, high)
    # Round to the looser side, so that steps exactly at the quantiles pass.
    absolute, relative = (rounded(value, up) for value, up in zip(thresholds(high), (False, True), strict=True))
    return Proposal(
        {"kt.prob_filter_abs_thres": absolute, "kt.prob_filter_rel_thres": relative},
        f"half of the prompts are expected to open {expected(absolute, relative):.1f} branches or more",
    )


def probabilities(group: Group) -> tuple[np.ndarray, np.ndarray]:
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
    """Return a share rounded up or down to two significant digits.

    >>> rounded(0.0432, up=False), rounded(0.0432, up=True), rounded(0.999, up=True)
    (0.043, 0.044, 1.0)
    """
    if value <= 0:
        return 0.0
    digits = 1 - math.floor(math.log10(value))
    scaled = value * 10**digits
    return min(1.0, round((math.ceil(scaled) if up else math.floor(scaled)) / 10**digits, digits))


def arpo_thresholds(groups: Sequence[Group], n: int, keys: Mapping) -> Proposal | None:
    """Return the largest `entropy_weight` at which enough tool results are followed by a fork to grow n trajectories.

    The proposal also sets `branch_policy=threshold` and `branch_probability=1`.

    Args:
        groups: plain samples with tools.
        n: number of trajectories of a prompt.
        keys: ARPO's keys of actor_rollout_ref.rollout: initial_rollouts, beam_size, entropy_tokens.

    Returns:
        a proposal; None if no sample has tokens of the model after a tool's result.
    """
    rows = [row for group in groups for row in group.trajectories]
    ratios = [ratio for row in rows for ratio in entropy_ratios(row, keys["entropy_tokens"])]
    if not ratios:
        return None
    decisions, initial = len(ratios) / len(rows), min(keys["initial_rollouts"], n)
    places = (n - initial) / max(1, keys["beam_size"] - 1)
    share = min(1.0, places / (initial * decisions))
    weight = float(np.quantile(ratios, 1 - share)) if share < 1 else 0.0
    return Proposal(
        {"branch_policy": "threshold", "branch_probability": 1.0, "entropy_weight": float(f"{weight:.3g}")},
        f"{share:.0%} of the states after a tool's result are expected to fork; a trajectory has {decisions:.1f} of "
        f"them, and there the entropy is {fmean(ratios):.2f} times that after the prompt",
    )


def entropy_ratios(row: Trajectory, entropy_tokens: int) -> Iterator[float]:
    """Yield, for each of the model's turns after the first, its mean entropy divided by the first turn's mean entropy.

    Args:
        entropy_tokens: number of tokens at the beginning of each turn over which the mean is taken.
    """
    turns: list[list[float]] = []
    before: Step | None = None
    for step in row.steps:
        if step is not None:
            turns += [] if before else [[]]
            turns[-1].append(step.entropy)
        before = step
    means = [fmean(turn[:entropy_tokens]) for turn in turns]
    yield from (mean / means[0] for mean in means[1:] if means[0] > 0)
