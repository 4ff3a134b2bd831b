"""The proposed thresholds, by hand and by growing the trees for which they are proposed."""

import asyncio
import math
import random

import numpy as np
import pytest

from recipe.latr.keys import KTConfig
from recipe.latr.proposal import expected_branches, latr_thresholds, probabilities, propose, rounded
from recipe.latr.tree import Policy
from verl.evaluation.exploration.proposals import Samples
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


@pytest.mark.parametrize(
    ("opened", "best"),
    [([4], 0), ([2, 4], 1), ([2, 3, 3.5, 4], 2), ([3, 2, 2], 0)],  # of n = 4, by the median tree of each attempt
)
def test_thresholds_are_loosened_until_the_trees_are_full(opened, best):
    tried = []

    async def grow_groups(proposal):
        tried.append(tuple(proposal.values.values()))
        return [Group([1], [], 0, {"branches": opened[len(tried) - 1]})], 1.0

    steps = [Step(0.0, 0.5 + at / 100, 0.5 - at / 100) for at in range(50)]
    groups = [Group([1], [row(steps)], 0)]
    proposal, grown, _ = asyncio.run(propose(Samples(4, {}, groups, groups), grow_groups))
    assert len(tried) == min(len(opened), 3) and tuple(proposal.values.values()) == tried[best]
    assert grown[0].metrics["branches"] == opened[best] and f"have {opened[best]:g} or more of 4" in proposal.expected
    if opened[0] < 4:  # more are aimed at
        assert tried[1][0] < tried[0][0] and tried[1][1] > tried[0][1]
