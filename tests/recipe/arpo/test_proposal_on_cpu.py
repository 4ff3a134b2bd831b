"""The threshold that is proposed for ARPO, by hand and on random entropies."""

import random

import numpy as np
import pytest

from recipe.arpo.proposal import arpo_thresholds, entropy_ratios
from verl.evaluation.exploration.table import Group, Step, Trajectory


def row(steps) -> Trajectory:
    return Trajectory(range(len(steps)), steps, False, "")


def test_entropies_after_tools_by_hand():
    entropies = [1.0, 3.0, None, None, 4.0, 8.0, 100.0, None, 1.0]
    steps = [None if e is None else Step(e, 0.5, 0.4) for e in entropies]
    assert list(entropy_ratios(row(steps), 2)) == [6.0 / 2.0, 1.0 / 2.0]
    assert list(entropy_ratios(row(steps), 1)) == [4.0, 1.0]
    assert list(entropy_ratios(row(steps[:3]), 2)) == []


def test_arpo_forks_as_often_as_there_are_places():
    keys = {"initial_rollouts": 4, "beam_size": 2, "entropy_tokens": 1}
    draw = random.Random(1)
    groups = [Group([1], [row([Step(1.0, 0.5, 0.4), *later]) for later in _later(draw)], 0) for _ in range(10)]
    proposal = arpo_thresholds(groups, 8, keys)
    weight = proposal.values["entropy_weight"]
    after = [step.entropy for group in groups for each in group.trajectories for step in each.steps[1:] if step]
    # four places, and four trajectories that decide twice each: half of the states
    assert np.mean([entropy > weight for entropy in after]) == pytest.approx(0.5, abs=0.02)
    assert proposal.values["branch_policy"] == "threshold" and proposal.values["branch_probability"] == 1
    assert arpo_thresholds(groups, 40, keys).values["entropy_weight"] == 0  # more places than states
    assert arpo_thresholds([Group([1], [row([Step(1.0, 0.5, 0.4)])], 0)], 8, keys) is None


def _later(draw) -> list[list[Step | None]]:
    """Of eight trajectories: two results, each with a step of the model after it."""
    return [[None, Step(draw.random(), 0.5, 0.4), None, Step(draw.random(), 0.5, 0.4)] for _ in range(8)]
