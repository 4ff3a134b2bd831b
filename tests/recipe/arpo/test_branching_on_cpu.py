"""Branch policies, budgets and proposals of ARPO and AEPO against hand-computed numbers and slow references."""

import json
import math
import random

import numpy as np
import pytest

from recipe.arpo.budget import BranchBudget
from recipe.arpo.proposal import arpo_thresholds, entropy_ratios
from recipe.arpo.tree import ARPOConfig, dynamic_initial_rollouts, fork_probability
from tests.refusals import refused, says
from tests.tables import table
from verl.evaluation.exploration.table import Certainty, SampledGroup, Samples, Trajectory
from verl.workers.config.keys import ROLLOUT, read_keys


@pytest.mark.parametrize(("policy", "now", "base", "consecutive", "expected"), table(__file__, "branch policies"))
def test_branch_policies_by_hand(policy, now, base, consecutive, expected):
    assert fork_probability(now, base, consecutive, ARPOConfig(branch_policy=policy)) == pytest.approx(expected)


def test_probabilities_are_clipped():
    assert [fork_probability(h, 1 - h, 0, ARPOConfig(entropy_weight=5)) for h in (1.0, 0.0)] == [1.0, 0.0]


def test_dynamic_budget_by_hand():
    assert dynamic_initial_rollouts(16, 0.3, 0.3, 0.5) == 8
    assert dynamic_initial_rollouts(16, 1.0, 0.0, 0.5) == round(16 / (1 + math.exp(-0.5)))
    assert dynamic_initial_rollouts(16, 0.0, 100.0, 0.5) == 1
    assert dynamic_initial_rollouts(16, 100.0, 0.0, 0.5) == 16


@pytest.mark.parametrize(("change", "message"), refused(__file__, "keys"))
def test_a_wrong_key_is_named(change, message):
    with pytest.raises(ValueError) as error:
        read_keys(ARPOConfig, json.loads(change), ROLLOUT)
    assert says(error.value, f"{ROLLOUT}.{message}")


# -- the budget --


def wants_of(seed: int, probability: float):
    """Whether a trajectory forks after a call, and after how many calls it ends: facts, whoever is fast."""

    def forks(key, calls):
        return random.Random(f"{seed} {key} {calls}").random() < probability

    def last_call(key):
        return random.Random(f"{seed} end {key}").randrange(0, 4)

    return forks, last_call


def grow(seed: int, order: random.Random, slots: int, initial: int, beam: int, limit: int, probability: float):
    """Drives a BranchBudget with trajectories that move in the order that `order` says; keys that ran, and fills."""
    forks, last_call = wants_of(seed, probability)
    budget, at, fills, ran = BranchBudget(slots, beam, limit), {}, 0, set()
    for i in range(initial):
        budget.enter((i,), 0)
        at[i,] = 0
    while True:
        for key in budget.grant():
            at[key] = key[-2]  # calls when it left
        fills += budget.take_spare()
        ran |= at.keys()
        if not at:
            assert budget.slots == 0
            return ran, fills
        key = order.choice(sorted(at))
        if at[key] < max(last_call(key), 0) and at[key] < limit:
            at[key] += 1
            budget.decide(key, at[key], forks(key, at[key]))
        else:
            budget.leave(key)
            del at[key]


def in_logical_order(seed: int, slots: int, initial: int, beam: int, limit: int, probability: float):
    """The slow, obvious way: all trajectories after their first call, then after their second, …, by branch."""
    forks, last_call = wants_of(seed, probability)
    ran = {(i,): 0 for i in range(initial)}
    left = slots
    for calls in range(1, limit + 1):
        movers = [key for key, start in ran.items() if start < calls <= min(last_call(key), limit)]
        claims = [(*key, calls, branch) for key in movers if forks(key, calls) for branch in range(beam - 1)]
        for claim in sorted(claims)[:left]:
            left -= 1
            ran[claim] = calls
    return set(ran), left


@pytest.mark.parametrize("seed", range(40))
def test_branches_do_not_depend_on_speed(seed):
    rng = random.Random(seed)
    size = {
        "slots": rng.randrange(0, 9),
        "initial": rng.randrange(1, 6),
        "beam": rng.randrange(1, 4),
        "limit": rng.randrange(1, 4),
        "probability": rng.choice([0.2, 0.6, 1.0]),
    }
    expected = in_logical_order(seed, **size)
    for order in range(10):
        assert grow(seed, random.Random(order), **size) == expected


def test_slots_that_no_branch_can_need_are_spare_at_once():
    budget = BranchBudget(slots=10, beam_size=2, call_limit=1)
    for i in range(3):
        budget.enter((i,), 0)
    assert budget.take_spare() == 7  # each of the three may fork once
    budget.leave((0,))
    assert budget.take_spare() == 1
    assert budget.grant() == []


# -- the proposal of a threshold --


def row(steps) -> Trajectory:
    return Trajectory(range(len(steps)), steps, False, "")


def test_entropies_after_tools_by_hand():
    entropies = [1.0, 3.0, None, None, 4.0, 8.0, 100.0, None, 1.0]
    steps = [None if e is None else Certainty(e, 0.5, 0.4) for e in entropies]
    assert list(entropy_ratios(row(steps), 2)) == [6.0 / 2.0, 1.0 / 2.0]
    assert list(entropy_ratios(row(steps), 1)) == [4.0, 1.0]
    assert list(entropy_ratios(row(steps[:3]), 2)) == []


def test_arpo_forks_as_often_as_there_are_places():
    keys, draw = {"initial_rollouts": 4, "beam_size": 2, "entropy_tokens": 1}, random.Random(1)

    def trajectory():
        """Two results, each with a step of the model after it."""
        entropies = [1.0, None, draw.random(), None, draw.random()]
        return row([None if e is None else Certainty(e, 0.5, 0.4) for e in entropies])

    groups = [SampledGroup([1], [trajectory() for _ in range(8)], 0) for _ in range(10)]
    proposal = arpo_thresholds(Samples(8, keys, [], groups))
    weight = proposal.values["entropy_weight"]
    after = [step.entropy for group in groups for each in group.trajectories for step in each.steps[1:] if step]
    # four places, and four trajectories that decide twice each: half of the states
    assert np.mean([entropy > weight for entropy in after]) == pytest.approx(0.5, abs=0.02)
    assert proposal.values["branch_policy"] == "threshold" and proposal.values["branch_probability"] == 1
    assert arpo_thresholds(Samples(40, keys, [], groups)).values["entropy_weight"] == 0  # more places than states
    without_tools = SampledGroup([1], [row([Certainty(1.0, 0.5, 0.4)])], 0)
    assert arpo_thresholds(Samples(8, keys, [], [without_tools])) is None
