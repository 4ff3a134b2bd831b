"""Schedules of LATR over training: the share of tree rollouts, and (optional) the thresholds."""

from dataclasses import replace
from typing import NamedTuple

from recipe.latr.keys import KTConfig


class Tightened(NamedTuple):
    """The parameter scheduler's state: number of steps by which thresholds are tightened, below 0 loosened."""

    steps: int = 0


def mix_ratio(schedule: dict[int, float], training_step: int) -> float:
    """Return the ratio of the last scheduled step reached; it depends on the step alone, so a resumed run agrees.

    >>> [mix_ratio({0: 1.0, 10: 0.75, 20: 0.5}, step) for step in (0, 9, 10, 25)]
    [1.0, 1.0, 0.75, 0.5]
    """
    return schedule[max(step for step in schedule if step <= training_step)]


def tree_branches(n: int, ratio: float) -> int:
    """Return how many of n responses come from the tree; Python's rounding, as in the published code."""
    return round(n * ratio)


def tightened(config: KTConfig, steps: int) -> KTConfig:
    """Return the config with its thresholds moved by `steps` times param_scheduler_step, clamped to [0, 1].

    Positive steps tighten, so fewer branches open and more are dropped: prob_filter_abs_thres and the edit distance's
    threshold rise; prob_filter_rel_thres and the thresholds of suffix match and ROUGE-L fall. Negative steps loosen.
    """

    def moved(value: float | None, direction: int) -> float | None:
        return None if value is None else min(max(value + direction * steps * config.param_scheduler_step, 0.0), 1.0)

    return replace(
        config,
        prob_filter_abs_thres=moved(config.prob_filter_abs_thres, 1),
        prob_filter_rel_thres=moved(config.prob_filter_rel_thres, -1),
        rollout_filter_edit_dist_thres=moved(config.rollout_filter_edit_dist_thres, 1),
        rollout_filter_suffix_match_thres=moved(config.rollout_filter_suffix_match_thres, -1),
        rollout_filter_rouge_l_thres=moved(config.rollout_filter_rouge_l_thres, -1),
    )


def next_tightened_steps(config: KTConfig, steps: int, suppress_ratio: float, empty_branch_ratio: float) -> int:
    """Return the number of steps for `tightened` after a training step, within max_n_step in either direction; both
    ratios are means over the trees."""
    if not config.enable_param_scheduler:
        return steps
    if suppress_ratio > config.suppress_ratio_thres:
        steps += 1
    if empty_branch_ratio > config.empty_branch_ratio_thres:
        steps -= 1
    return min(max(steps, -config.max_n_step), config.max_n_step)
