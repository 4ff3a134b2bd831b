"""ARPO without tools: turns end with a delimiter or after so many tokens, and a trajectory may fork after each.

The trees are looked at from outside: what a turn must be, and where a fork must be, follows from the engine's
probabilities alone. A delimiter may have two letters, so that a request may end within it.
"""

import asyncio
import math
import random
from itertools import groupby
from statistics import fmean

import pytest

from recipe.arpo.tree import ARPOConfig, Policy, dynamic_initial_rollouts
from tests.workers.rollout.toy_engine import EOS, VOCAB, Calls, HashEngine, Letters
from verl.workers.rollout.tree_builder import grow

SEEDS = range(40)
# the probability to fork is 0 or 1: whether the entropy has risen
RISEN = {"branch_probability": 0.5, "entropy_weight": 1e9}


def case_of(seed: int):
    generator = random.Random(seed)
    config = ARPOConfig(
        initial_rollouts=generator.randint(1, 6),
        beam_size=generator.randint(2, 3),
        entropy_tokens=generator.randint(1, 6),
        entropy_top_k=4,
        enable_dynamic_rollouts=generator.random() < 0.3,
        turn_delimiter=generator.choice(["a", "b", "ab"]),
        max_turn_tokens=generator.choice([1, 4, 15]),
        turn_limit=generator.randint(0, 4),
        **RISEN,
    )
    return HashEngine(generator.choice([1.0, 3.0]), 2), config, generator.randint(1, 12), generator.choice([3, 20, 60])


def grown(engine, config, n, max_tokens, seed=0):
    policy = Policy(config, Letters().decode)
    options = {"max_tokens": max_tokens, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": seed}
    return asyncio.run(grow(engine, [3], n, policy, **options))


class Seen:
    """A trajectory as its leaf shows it: turns are segments, each with the key of who wrote it."""

    def __init__(self, tree, leaf):
        self.path = tree.path(leaf)
        self.turns = [tree.segments[i].token_ids for i in self.path]
        self.key = tuple(tree.segments[leaf].info.notes["key"])
        self.born = self.key[-2] if len(self.key) > 1 else 0  # at the end of which turn


def entropy_of(engine, before, tokens):
    """Mean over tokens, in nats."""
    entropies = []
    for i in range(len(tokens)):
        p = engine.probabilities([3, *before, *tokens[:i]])
        entropies.append(-sum(x * math.log(x) for x in p if x))
    return fmean(entropies)


def looked_at(engine, config, trajectory, turn):
    before = [token for tokens in trajectory.turns[:turn] for token in tokens]
    return entropy_of(engine, before, trajectory.turns[turn][: config.entropy_tokens])


@pytest.mark.parametrize("seed", SEEDS)
def test_turns_end_where_they_must(seed):
    engine, config, n, max_tokens = case_of(seed)
    tree = grown(engine, config, n, max_tokens)
    assert len(tree.leaves) == n
    for trajectory in (Seen(tree, leaf) for leaf in tree.leaves):
        response = [token for turn in trajectory.turns for token in turn]
        assert 0 < len(response) <= max_tokens and EOS not in response[:-1]
        assert response[-1] == EOS or len(response) == max_tokens
        *paused, last = trajectory.turns
        assert len(paused) <= config.turn_limit
        for tokens in paused:
            text = Letters().decode(tokens)
            assert config.turn_delimiter not in text[:-1] and len(tokens) <= config.max_turn_tokens
            assert text.endswith(config.turn_delimiter) or len(tokens) == config.max_turn_tokens
        if len(paused) < config.turn_limit:  # a longer last turn would have paused
            assert len(last) <= config.max_turn_tokens and config.turn_delimiter not in Letters().decode(last[:-1])


@pytest.mark.parametrize("seed", SEEDS)
def test_forks_are_where_the_entropy_has_risen_while_the_budget_lasts(seed):
    """Forks are granted in the order (turns ended, key of the branch), however fast each request is."""
    engine, config, n, max_tokens = case_of(seed)
    tree = grown(engine, config, n, max_tokens)
    all_of = {trajectory.key: trajectory for trajectory in (Seen(tree, leaf) for leaf in tree.leaves)}
    assert len(all_of) == n
    initial = min(config.initial_rollouts, n)
    if config.enable_dynamic_rollouts:
        probe = all_of[0,]
        h = [looked_at(engine, config, probe, turn) for turn in range(len(probe.turns))]
        initial = dynamic_initial_rollouts(n, h[0], fmean(h[1:] or [0.0]), config.dynamic_rollouts_beta)
    assert tree.metrics["initial_rollouts"] == initial
    left, running = n - initial, {(i,) for i in range(initial)}
    for turn in range(1, config.turn_limit + 1):
        claims = []
        for key in running:
            trajectory = all_of[key]
            if trajectory.born < turn < len(trajectory.turns):
                base = looked_at(engine, config, trajectory, 0)
                if looked_at(engine, config, trajectory, turn) > base:
                    claims += [(*key, turn, branch) for branch in range(config.beam_size - 1)]
        granted = sorted(claims)[:left]
        left -= len(granted)
        running |= set(granted)
        for key in granted:  # the branch left its parent before this turn
            branch, parent = all_of[key], all_of[key[:-2]]
            assert branch.path[:turn] == parent.path[:turn] and branch.path[turn] != parent.path[turn]
    assert set(all_of) == running | {(initial + i,) for i in range(left)}, "the others start from the prompt"
    assert tree.metrics["forks"] + tree.metrics["filled"] == n - initial and tree.metrics["filled"] == left


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_delimiter_may_cross_the_end_of_a_request(cut):
    """The engine writes cdefab again and again, ended by requests of any size; a turn is cdefab."""

    class Cycle(HashEngine):
        def probabilities(self, tokens):
            following = {ord(a) - 97: ord(b) - 97 for a, b in zip("cdefab", "defabc", strict=True)}
            return [1.0 if token == following[tokens[-1]] else 1e-30 for token in range(VOCAB)]

    config = ARPOConfig(initial_rollouts=1, entropy_tokens=cut, entropy_top_k=4, turn_delimiter="ab", turn_limit=2)
    tree = grown(Cycle(), config, 1, 18)
    texts = [Letters().decode(segment.token_ids) for segment in tree.segments]
    assert texts == ["efab", "cdefab", "cdefabcd"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n_tokens", [1, 3, 8])
def test_entropies_are_of_the_first_tokens_of_a_turn_with_tools(n_tokens, seed):
    never = {"branch_probability": 0.0, "entropy_weight": 0.0}
    config = ARPOConfig(initial_rollouts=16, entropy_tokens=n_tokens, entropy_top_k=VOCAB, **never)
    engine, policy = HashEngine(2.0), Policy(config, Letters().decode)
    options = {"max_tokens": 60, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": seed}
    tree = asyncio.run(grow(engine, [3], 16, policy, environment=Calls(), **options))
    after_prompt, after_tool = [], []
    for response, mask in zip(tree.trajectories(), tree.response_masks(), strict=True):
        blocks = [list(block) for _, block in groupby(range(len(response)), key=lambda i, mask=mask: mask[i])]
        turns = [block for block in blocks if mask[block[0]]]
        firsts = [[response[i] for i in turn[:n_tokens]] for turn in turns]
        entropies = [
            entropy_of(engine, response[: turn[0]], tokens) for turn, tokens in zip(turns, firsts, strict=True)
        ]
        after_prompt.append(entropies[0] / math.log(VOCAB))
        after_tool += [entropy / math.log(VOCAB) for entropy in entropies[1:]]
    assert after_tool and tree.metrics["forks"] == 0
    assert tree.metrics["entropy_after_prompt"] == pytest.approx(fmean(after_prompt))
    assert tree.metrics["entropy_after_tool"] == pytest.approx(fmean(after_tool))
