"""TreePO grows in rounds, forks by its rule and falls back; its advantage against a slow version."""

import re
from collections import Counter
from functools import partial

import numpy as np
import pytest

from recipe.compared.treepo.tree import Policy, TreePOKeys
from tests.recipe.compared import credit
from tests.recipe.compared.engines import PROMPT, Script, grown_by
from tests.trainer.ppo.credit.random_trees import random_batch
from tests.workers.rollout.toy_engine import EOS, Calls, HashEngine, Letters

LETTERS = Letters().decode


class Recorder:
    """An engine that remembers each response so far, in the order of the requests, and what it has added to it."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []

    async def generate(self, request):
        call = [tuple(request.prompt_ids[len(PROMPT) :]), ()]
        self.calls.append(call)
        generation = await self.engine.generate(request)
        call[1] = tuple(generation.token_ids)
        return generation


def grown(engine, n=8, seed=0, text_of=LETTERS, environment=None, **keys):
    keys = TreePOKeys(**{"segment_length": 4, "max_depth": 20, "first_round_divergence": 4} | keys)
    options = {"environment": environment} if environment else {}
    return grown_by(Policy(keys, text_of), engine, n, seed=seed, **options)


def replayed(calls, n, divergence, first, has_ended):
    """The ended trajectories of the recorded calls, each round of which is checked against the paper's rule."""
    calls, ended, fallbacks = list(calls), [], 0
    live = [((),)] * next((i for i, call in enumerate(calls) if call[0]), len(calls))
    assert min(n, divergence) <= len(live) <= min(n, first)
    while live:
        of_round, calls = calls[: len(live)], calls[len(live) :]
        assert [begun for begun, _ in of_round] == [rounds[-1] for rounds in live], "each one goes on where it stood"
        going_on, just_ended = [], 0
        for rounds, (begun, new) in zip(live, of_round, strict=True):
            rounds = (*rounds, begun + new)
            if has_ended(rounds, new):
                ended.append(rounds)
                just_ended += 1
            else:
                going_on.append(rounds)
        if going_on:
            total = min(n - len(ended), divergence * (len(going_on) + just_ended))
            shares = [total // len(going_on)] * len(going_on)
            shares[-1] = total - sum(shares[:-1])
            assert min(shares) >= 1
            live = [rounds for rounds, share in zip(going_on, shares, strict=True) for _ in range(share)]
        else:
            live = fallen_back([begun for begun, _ in calls], ended, divergence, n - len(ended))
            fallbacks += len(live)
    assert not calls
    return [rounds[-1] for rounds in ended], fallbacks


def fallen_back(begun, ended, divergence, places):
    """The ended trajectories, cut, that these requests go on from: each of them at most once, and never its whole."""
    number = min(places, divergence * len(ended))
    cuts = begun[:number:divergence]
    assert begun[:number] == [cut for cut in cuts for _ in range(divergence)][:number]
    for cut, times in Counter(cuts).items():
        assert times <= sum(cut in rounds[:-1] for rounds in ended)
    starts = {rounds[at]: rounds[: at + 1] for rounds in ended for at in range(len(rounds) - 1)}
    return [starts[tokens] for tokens in begun[:number]]


@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"divergence": 3, "first_round_divergence": 3},
        {"divergence": 1, "first_round_divergence": 6, "segment_length": 2},
        {"max_depth": 3, "segment_length": 5},
        {"repetition_length": 1, "repetition_count": 3, "segment_length": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(4))
def test_rounds_forks_and_fallbacks_follow_the_rule(seed, keys, n):
    engine, rule = (
        Recorder(HashEngine(sharpness=3, memory=3)),
        TreePOKeys(**{"segment_length": 4, "max_depth": 20} | keys),
    )
    tree = grown(engine, n, seed=seed, **keys)
    repeated = rf"(.{{{rule.repetition_length}}})(.*\1){{{rule.repetition_count - 1}}}"

    def has_ended(rounds, new):
        assert len(new) <= rule.segment_length
        is_long = len(rounds[-1]) == 30 or len(rounds) - 1 == rule.max_depth
        return new[-1] == EOS or is_long or bool(re.search(repeated, LETTERS(new)))

    first = keys.get("first_round_divergence", 4)
    rows, fallbacks = replayed(engine.calls, n, rule.divergence, first, has_ended)
    assert tree.trajectories() == [list(row) for row in rows]
    assert tree.metrics["fallbacks"] == fallbacks


def test_the_number_of_first_trajectories_is_drawn_for_each_prompt():
    def first(seed, n=16):
        engine = Recorder(Script([4, 4, EOS]))
        grown(engine, n, seed=seed, first_round_divergence=8, segment_length=2)
        return sum(begun == () for begun, _ in engine.calls[:8])

    drawn = Counter(first(seed) for seed in range(210))
    assert drawn.keys() == set(range(2, 9)) and min(drawn.values()) > 12
    assert max(first(seed, n=3) for seed in range(20)) == 3


def test_a_fallback_goes_on_from_every_round_alike():
    """2, 4 and 8 trajectories live in the first three rounds, at whose end 8 have ended and 22 places are free."""
    starts = Counter()
    for seed in range(30):
        engine = Recorder(Script([4, 4, 4, 4, 4, EOS]))
        grown(engine, 30, seed=seed, segment_length=2, first_round_divergence=2)
        fallback = [len(begun) for begun, _ in engine.calls[14:30]]
        assert fallback[::2] == fallback[1::2]
        starts.update(fallback[::2])
    assert starts.keys() == {0, 2, 4} and min(starts.values()) > 55


@pytest.mark.parametrize(("text", "ends"), [("-" * 255, False), ("-" * 256, True), ("ab, " * 63, False)])
def test_a_text_of_32_characters_may_occur_seven_times_in_a_round(text, ends):
    """Overlapping occurrences count once: a line of dashes repeats nothing, unless it is as long as the eight texts."""
    engine = Recorder(Script([4, 4, 5, EOS]))
    grown(engine, 2, text_of=lambda tokens: text if 4 in tokens else "so", segment_length=2)
    assert [begun for begun, _ in engine.calls] == [(), ()] + [(4, 4)] * 2 * (not ends)
    grown(engine := Recorder(Script([4, 4, 5, EOS])), 2, text_of=lambda tokens: text, repetition_count=0)
    assert len(engine.calls) == 2


def test_branches_that_begin_alike_are_nodes_of_their_own():
    tree = grown(Script([1, 1, 1, 1, 2, 2, EOS]), 4, first_round_divergence=2)
    assert tree.trajectories() == [[1, 1, 1, 1, 2, 2, EOS]] * 4
    ids = tree.segment_ids()
    assert [row[0] == ids[0][0] for row in ids] == [True, True, False, False] and len({row[-1] for row in ids}) == 4
    assert tree.metrics["shared_tokens"] == pytest.approx(8 / 28)


# ---- with tools ----


@pytest.mark.parametrize("seed", range(8))
def test_a_round_counts_the_models_tokens_and_ends_with_one(seed):
    """Two trajectories part where whole rounds end; a result belongs to the round of its call, and is not the end."""
    environment = Calls(call_limit=3)
    tree = grown(HashEngine(2, memory=3), 10, environment=environment, seed=seed, segment_length=3, max_depth=4)
    masks, ids = tree.response_masks(), tree.segment_ids()
    assert all(mask[-1] == 1 and sum(mask) <= 12 for mask in masks)
    shared = 0
    for i, row in enumerate(ids):
        for other in ids[:i]:
            n = sum(a == b for a, b in zip(row, other, strict=False))
            assert row[:n] == other[:n] and sum(masks[i][:n]) % 3 == 0
            shared += n
    assert shared and tree.metrics["tool_calls"] == len(environment.answered)


STRATEGIES = ["average", "group_size"]

advantage = partial(credit.advantage, "treepo", norm=False)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(6))
def test_against_a_slow_version(seed, strategy, norm):
    batch = random_batch(seed)
    result = advantage(
        batch.outcomes, batch.segment_ids, batch.index, batch.mask, norm=norm, adv_weight_strategy=strategy
    )
    for i, row in enumerate(batch.rows):
        group = [j for j in range(len(batch.rows)) if batch.index[j] == batch.index[i]]
        # the trajectories that are equal to this one up to some token; the same ones are one subtree
        subtrees = {tuple(j for j in group if batch.rows[j][:length] == row[:length]) for length in range(len(row) + 1)}
        values, weights = [], []
        for subtree in subtrees:
            if len(subtree) > 1:
                values.append(batch.outcomes[i] - batch.outcomes[list(subtree)].mean())
                weights.append(1 if strategy == "average" else len(subtree))
        expected = np.average(values, weights=weights)
        if norm:
            expected /= batch.outcomes[group].std(ddof=1) + 1e-6
        assert result[i].tolist() == pytest.approx((expected * batch.mask[i]).tolist(), abs=1e-9)
