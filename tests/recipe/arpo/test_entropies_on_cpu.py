"""The entropies by which ARPO decides about forks, computed anew from the engine's own distributions."""

import asyncio
import math
from itertools import groupby
from statistics import fmean

import pytest

from recipe.arpo.keys import ARPOConfig
from recipe.arpo.tree import Policy
from tests.workers.rollout.toy_engine import EOS, VOCAB, Calls, HashEngine, Letters
from verl.workers.rollout import tree_builder as builder

PROMPT = [1, 2, 3]


def first_tokens_entropy(engine: HashEngine, response: list[int], turn: range, n_tokens: int) -> float:
    """Return the mean entropy, over log |V|, of the first tokens of a turn."""
    distributions = [engine.probabilities([*PROMPT, *response[:i]]) for i in turn[:n_tokens]]
    return fmean(-sum(p * math.log(p) for p in row if p) for row in distributions) / math.log(VOCAB)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n_tokens", [1, 3, 8])
def test_entropies_are_of_the_first_tokens_of_a_turn(n_tokens, seed):
    config = ARPOConfig(
        initial_rollouts=16, entropy_tokens=n_tokens, entropy_top_k=VOCAB, branch_probability=0.0, entropy_weight=0.0
    )
    engine, policy = HashEngine(2.0), Policy(config, Letters().decode)
    options = {"max_tokens": 60, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": seed}
    tree = asyncio.run(builder.grow(engine, PROMPT, 16, policy, environment=Calls(), **options))
    after_prompt, after_tool = [], []
    for response, mask in zip(tree.trajectories(), tree.response_masks(), strict=True):
        blocks = [list(block) for _, block in groupby(range(len(response)), key=lambda i, mask=mask: mask[i])]
        turns = [range(block[0], block[-1] + 1) for block in blocks if mask[block[0]]]
        entropies = [first_tokens_entropy(engine, response, turn, n_tokens) for turn in turns]
        after_prompt.append(entropies[0])
        after_tool += entropies[1:]
    assert after_tool and tree.metrics["forks"] == 0
    assert tree.metrics["entropy_after_prompt"] == pytest.approx(fmean(after_prompt))
    assert tree.metrics["entropy_after_tool"] == pytest.approx(fmean(after_tool))
