"""Proposes a threshold at which a model's trajectories fork often enough after tools' results (scripts/explore.sh).

ARPO's policy `threshold` forks where the entropy after a tool's result is above entropy_weight times that after the
prompt. The published values fit the paper's models, not every model and task.
"""

from collections.abc import Iterator
from statistics import fmean

import numpy as np

from verl.evaluation.exploration.table import Proposal, Samples, Trajectory
from verl.utils.parts import register_proposal


@register_proposal("arpo")
def arpo_thresholds(samples: Samples) -> Proposal | None:
    """Return the largest `entropy_weight` at which enough tool results are followed by a fork to grow n trajectories,
    with `branch_policy=threshold` and `branch_probability=1`; None if no sample goes on after a tool's result."""
    n, keys = samples.n, samples.rollout
    rows = [row for group in samples.usual for row in group.trajectories]
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
    """Yield, for each of the model's turns after the first, its mean entropy divided by the first turn's, both over the
    first `entropy_tokens` tokens."""
    turns: list[list[float]] = [[]]
    for step in row.steps:
        if step is None:
            turns.append([])
        else:
            turns[-1].append(step.entropy)
    means = [fmean(turn[:entropy_tokens]) for turn in turns if turn]
    yield from (mean / means[0] for mean in means[1:] if means[0] > 0)
