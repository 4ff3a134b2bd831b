"""The proposed thresholds, by hand and by growing the trees for which they are proposed."""

import asyncio
import math
import random

import numpy as np
import pytest
from verl.evaluation.exploration.thresholds import (
    arpo_thresholds,
    entropy_ratios,
    expected_branches,
    latr_thresholds,
    probabilities,
    rounded,
)

from recipe.latr.keys import KTConfig
from recipe.latr.tree import Policy
from verl.evaluation.exploration.table import Group, Step, Trajectory
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine
from verl.workers.rollout.tree_builder import grow

LENGTH, N = 20, 8


def row(steps) -> Trajectory:
    return Trajectory(range(len(steps)), steps, False, "")


def test_expected_branches_by_hand():
    sure, unsure, nearly = Step(0.1, 0.95, 0.04), Step(0.7, 0.5, 0.4), Step(0.6, 0.6, 0.2)
    group = Group([1], [row([unsure, sure, unsure]), row([unsure, unsure]), row([sure, None, nearly])], 0)
    # at the first place two of three samples pass, at the second one, at the last one, too
    assert expected_branches(*probabilities(group), 0.3, 0.2) == pytest.approx((1 + 2 / 3) * (1 + 1 / 3) ** 2)
    assert expected_branches(*probabilities(group), 0.1, 0.5) == pytest.approx((1 + 2 / 3) * (1 + 1 / 3) * (1 + 2 / 3))
    assert expected_branches(*probabilities(group), 0.4, 0.2) == 1  # not above
    assert expected_branches(*probabilities(group), 0.0, 1.0) == pytest.approx(2 * (1 + 2 / 3) ** 2)


class Unsure(RolloutEngine):
    """After any text two tokens have probability: the first one's, from 0.5 to 1, follows from the text alone."""

    def choices(self, tokens) -> list[tuple[int, float]]:
        first = 0.5 + 0.5 * random.Random(str(tokens)).random() ** 0.3
        return [(1, math.log(first)), (2, math.log1p(-first))]

    async def generate(self, request: GenerationRequest) -> Generation:
        result, draw = Generation([], [], []), random.Random(request.seed)
        while len(result.token_ids) < request.max_tokens:
            choices = self.choices([*request.prompt_ids, *result.token_ids])
            token, log_prob = choices[0 if not request.temperature or draw.random() < math.exp(choices[0][1]) else 1]
            result.token_ids.append(token)
            result.log_probs.append(log_prob)
            result.top_logprobs.append(choices)
        return result

    def sampled(self, prompt: int) -> Trajectory:
        tokens, steps, draw = [prompt], [], random.Random(f"sample {prompt} {random.random()}")
        for _ in range(LENGTH):
            first = math.exp(self.choices(tokens)[0][1])
            steps.append(Step(0.0, first, 1 - first))
            tokens.append(1 if draw.random() < first else 2)
        return Trajectory(tokens[1:], steps, False, "")


def branches(engine: RolloutEngine, prompt: int, absolute: float, relative: float) -> int:
    """Of the tree that LATR grows, without dropping any."""
    config = KTConfig(
        prob_filter_abs_thres=absolute, prob_filter_rel_thres=relative, rollout_filter_edit_dist_thres=None
    )
    tree = asyncio.run(grow(engine, [prompt], N, Policy(config), max_tokens=LENGTH, stop_token_ids=[]))
    return len({tuple(tokens) for tokens in tree.trajectories()})


def test_about_half_of_latrs_trees_are_full_at_the_proposed_thresholds():
    engine, prompts = Unsure(), range(40)
    random.seed(0)
    groups = [Group([prompt], [engine.sampled(prompt) for _ in range(N)], 0) for prompt in prompts]
    values = list(latr_thresholds(groups, N).values.values())
    grown = [branches(engine, prompt, *values) for prompt in prompts]
    assert 0.3 <= np.mean([number == N for number in grown]) <= 0.8
    # the paper's leave most branches unused here
    assert np.mean([branches(engine, prompt, 0.25, 0.15) == N for prompt in prompts]) < 0.1


def test_a_model_that_is_never_unsure_enough_gets_the_loosest_thresholds():
    group = Group([1], [row([Step(0.1, 0.98, 0.02)]), row([Step(0.2, 0.96, 0.03)])], 0)
    proposal = latr_thresholds([group], 8)
    absolute, relative = proposal.values.values()
    assert absolute <= 0.02 and relative >= 0.96
    assert "2.0 branches or more" in proposal.expected or "1.5 branches or more" in proposal.expected


def test_the_line_is_one_of_hydra_overrides():
    group = Group([1], [row([Step(0.7, 0.5, 0.4)] * 3)], 0)
    line = latr_thresholds([group], 8).line()
    names = [part.partition("=")[0] for part in line.split()]
    keys = ("prob_filter_abs_thres", "prob_filter_rel_thres")
    assert names == [f"actor_rollout_ref.rollout.kt.{key}" for key in keys]


@pytest.mark.parametrize("up", [True, False])
def test_rounding_keeps_two_digits_on_its_side(up):
    draw = random.Random(0)
    for _ in range(200):
        value = draw.random() ** 4
        near = rounded(value, up)
        assert near >= value if up else near <= value
        assert abs(near - value) <= 0.1 * value + 1e-12
        assert float(f"{near:.2g}") == near


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
