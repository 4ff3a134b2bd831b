"""The value model's features of every step of a growing tree are recomputed here from the engine's distributions."""

import asyncio
import math
import random
from statistics import fmean

import pytest
import torch

from recipe.hato.keys import HATOConfig, TreeConfig, UncertaintyConfig
from recipe.hato.local_reward import Step, coherence, heuristic, local_reward, local_reward_function, progress
from recipe.hato.tree import Policy
from recipe.hato.value_model import FEATURES
from tests.tables import table
from tests.workers.rollout.toy_engine import EOS, VOCAB, HashEngine, Letters
from verl.workers.rollout import tree_builder as builder

PROMPT, MAX_TOKENS, MAX_STEP_TOKENS, MAX_DEPTH, MAX_NODES = [1, 2, 3], 24, 5, 4, 200


class Observer:
    """The local reward and the value model of a search; keeps the rounds: different steps, and all rows of features."""

    def __init__(self):
        self.steps: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.rounds: list[tuple[list, list[list[float]]]] = []

    def local_reward(self, step: Step) -> float:
        self.steps.append((tuple(step.before), tuple(step.tokens)))
        return reward_of(tuple(step.tokens))

    def predict(self, features):
        self.rounds.append((self.steps, features))
        self.steps = []
        values = torch.tensor([random.Random(str(row)).random() for row in features])
        return values, 1 - values


def reward_of(tokens: tuple[int, ...]) -> float:
    return random.Random(str(tokens)).random()


def expected_features(
    engine: HashEngine, before: tuple[int, ...], tokens: tuple[int, ...], siblings: list, depth: int, n_steps: int
) -> dict[str, float]:
    """Return the features of a step, all but its length.

    Args:
        siblings: tokens of the other steps after `before`.
        depth: number of steps to this one, itself included.
        n_steps: number of steps in the tree before this round.
    """
    response = [*before, *tokens]
    distributions = [engine.probabilities([*PROMPT, *response[:i]]) for i in range(len(response))]
    log_probs = [math.log(p[token]) for p, token in zip(distributions, response, strict=True)]
    entropies = [-sum(q * math.log(q) for q in p if q) for p in distributions[len(before) :]]
    own = log_probs[len(before) :]
    overlaps = [len({*tokens} & {*other}) / len({*tokens} | {*other}) for other in siblings]
    return {
        "mean_probability": math.exp(fmean(own)),
        "min_probability": math.exp(min(own)),
        "mean_entropy": fmean(entropies) / math.log(VOCAB),
        "depth": depth / MAX_DEPTH,
        "path_probability": math.exp(fmean(log_probs)),
        "sibling_agreement": fmean(overlaps) if overlaps else 0.0,
        "budget_used": n_steps / MAX_NODES,
        "finished": float(tokens[-1] == EOS),
        "local_reward": reward_of(tokens),
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_features_of_every_step(seed):
    shape = {"max_depth": MAX_DEPTH, "max_step_tokens": MAX_STEP_TOKENS, "max_nodes": MAX_NODES, "step_delimiter": "c"}
    config = HATOConfig(tree=TreeConfig(**shape), uncertainty=UncertaintyConfig(entropy_top_k=VOCAB))
    engine, observer = HashEngine(3.0), Observer()
    policy = Policy(config, observer, observer.local_reward, Letters().decode)
    options = {"max_tokens": MAX_TOKENS, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": seed}
    asyncio.run(builder.grow(engine, PROMPT, 16, policy, **options))
    depths, compared = {(): 0}, 0
    for steps, rows in observer.rounds:
        n_steps = len(depths) - 1
        for before, tokens in steps:
            depths[before + tokens] = depths[before] + 1
        if len(steps) < len(rows):
            continue  # steps that were drawn twice are given to the local reward once
        for i, ((before, tokens), row) in enumerate(zip(steps, rows, strict=True)):
            siblings = [other for j, (start, other) in enumerate(steps) if start == before and j != i]
            depth = depths[before + tokens]
            features = dict(zip(FEATURES, row, strict=True))
            left = MAX_TOKENS - len(before)
            most_tokens = left if depth == MAX_DEPTH else min(left, MAX_STEP_TOKENS)
            assert features.pop("length") == pytest.approx(len(tokens) / most_tokens)
            expected = expected_features(engine, before, tokens, siblings, depth, n_steps)
            assert features == pytest.approx(expected, abs=1e-6)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("before", "parent", "tokens", "expected_coherence", "expected_progress"), table(__file__, "heuristics")
)
def test_heuristics_by_hand(before, parent, tokens, expected_coherence, expected_progress):
    step = Step(problem=[1, 2, 3, 4], before=before, parent=parent, tokens=tokens)
    assert coherence(step) == pytest.approx(expected_coherence)
    assert progress(step) == pytest.approx(expected_progress)
    product, total = expected_coherence * expected_progress, expected_coherence + expected_progress
    assert heuristic(step) == pytest.approx(2 * product / total if total else 0.0)


def test_a_function_by_its_name():
    assert local_reward_function("heuristic") is heuristic
    assert local_reward_function("math.fsum").__name__ == "fsum"
    for name in ("no_such_module.f", "math.no_such_function", "bare"):
        with pytest.raises(ValueError, match=f"hato.local_reward={name}"):
            local_reward_function(name)
    with pytest.raises(ValueError, match="hato.local_reward=math.pi: expected a function, got float"):
        local_reward_function("math.pi")


def test_a_functions_number_is_cut_and_must_be_finite():
    step = Step(problem=[], before=[], parent=[], tokens=[])

    async def slow(_):
        await asyncio.sleep(0)
        return 0.25

    rewards = [asyncio.run(local_reward(function, step)) for function in (lambda _: 3, lambda _: -3, slow)]
    assert rewards == [1.0, 0.0, 0.25]
    with pytest.raises(ValueError, match="returned nan"):
        asyncio.run(local_reward(lambda _: float("nan"), step))
