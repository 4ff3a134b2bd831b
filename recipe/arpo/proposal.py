"""Proposes a threshold at which a model's trajectories fork often enough after tools' results (scripts/explore.sh).

ARPO's policy `threshold` forks where the entropy after a tool's result is above entropy_weight times that after the
prompt. The published values fit the paper's models, not every model and task.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np

from verl.evaluation.exploration.table import Group, Grow, Proposal, Proposed, Samples, Step, Trajectory
from verl.utils.parts import register_proposal


@register_proposal("arpo")
async def propose(samples: Samples, grow: Grow) -> Proposed | None:
    """Propose a threshold and grow trees with it; None if no sample goes on after a tool's result."""
    proposal = arpo_thresholds(samples.usual, samples.n, samples.rollout)
    return None if proposal is None else Proposed(proposal, *await grow(proposal))


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
