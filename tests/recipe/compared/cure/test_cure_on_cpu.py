"""CURE continues responses from before a critical token; its advantage against a slow version."""

import math
from collections import Counter
from functools import partial

import pytest

from recipe.compared.cure.tree import CUREKeys, Policy
from tests.recipe.compared import credit
from tests.recipe.compared.engines import Recorder, Script, grown_by, letter
from tests.trainer.ppo.credit.random_trees import random_batch
from tests.workers.rollout.toy_engine import EOS, HashEngine


def text_of(token):
    """The letter twice for every other token, or once between spaces."""
    return letter(token) * 2 if token % 2 else f" {letter(token)} "


def grown(engine, seed=0, **keys):
    keys = CUREKeys(**keys)
    return grown_by(Policy(keys, text_of), engine, keys.n1 * (1 + keys.n2), seed=seed)


def shared_tokens(tree, i, j):
    """The number of tokens that two trajectories have in common."""
    first, second = (tree.segment_ids()[k] for k in (i, j))
    n = sum(a == b for a, b in zip(first, second, strict=False))
    assert first[:n] == second[:n] and not set(first[n:]) & set(second[n:])
    return n


@pytest.mark.parametrize(
    "keys", [{"critical_top_k": 1}, {"critical_top_k": 5, "min_characters": 1}, {"n1": 2, "n2": 4}]
)
@pytest.mark.parametrize("seed", range(6))
def test_a_fork_is_at_one_of_the_tokens_with_the_highest_entropy(seed, keys):
    engine = Recorder(HashEngine(sharpness=2, memory=100))
    tree = grown(engine, seed=seed, **keys)
    keys, rows = CUREKeys(**keys), tree.trajectories()
    entropies_of_forks, expected = [], [(1, 2, 3)] * keys.n1
    for start in range(0, len(rows), 1 + keys.n2):
        response = rows[start]
        entropies = {}
        for at in range(1, len(response)):
            if response[at] != EOS and (keys.min_characters == 1 or response[at] % 2):
                p = engine.engine.probabilities([1, 2, 3, *response[:at]])
                entropies[at] = -sum(x * math.log(x) for x in p)
        critical = sorted(entropies, key=entropies.get)[-keys.critical_top_k :]
        at = shared_tokens(tree, start, start + 1)
        assert at in (critical or [0])
        assert all(shared_tokens(tree, start, start + i) == at for i in range(1, 1 + keys.n2))
        assert all(not shared_tokens(tree, start, i) for i in range(start))
        entropies_of_forks += [entropies[at]] if critical else []
        expected += [(1, 2, 3, *response[:at])] * keys.n2
    assert sorted(engine.asked) == sorted(expected)
    assert tree.metrics["critical_tokens"] == len(entropies_of_forks) > 0
    assert tree.metrics["critical_token_entropy"] == pytest.approx(sum(entropies_of_forks) / len(entropies_of_forks))
    assert all(segment.info.entropies is None for segment in tree.segments)


def test_every_critical_token_is_drawn_alike():
    """The first token, the end token and a short one are no candidates, however unsure the model was."""
    script = Script([1, 3, 4, 5, 7, 9, EOS], [9.0, 3.0, 9.0, 2.0, 1.0, 4.0, 9.0])
    engine = Recorder(script)
    for seed in range(300):
        grown(engine, seed=seed, n1=1, n2=1, critical_top_k=3)
    drawn = Counter(len(prompt) - 3 for prompt in engine.asked[1::2])
    assert drawn.keys() == {1, 3, 5} and min(drawn.values()) > 70


def test_equal_responses_and_continuations_share_the_prefix_alone():
    tree = grown(Script([1, 4, 3, 4, EOS], [0.0] * 5), n1=2, n2=2)
    assert tree.trajectories() == [[1, 4, 3, 4, EOS]] * 6
    assert [[shared_tokens(tree, i, j) for j in range(i)] for i in range(6)] == [
        [],
        [2],
        [2, 2],
        [0, 0, 0],
        [0, 0, 0, 2],
        [0, 0, 0, 2, 2],
    ]


def test_a_response_without_a_critical_token_is_followed_by_others_from_the_prompt():
    engine = Recorder(Script([1, 2, EOS], [1.0] * 3))
    tree = grown(engine, n1=2, n2=2)
    assert engine.asked == [(1, 2, 3)] * 6 and tree.metrics["critical_tokens"] == 0
    assert tree.metrics["shared_tokens"] == 0 and tree.metrics["critical_token_entropy"] == 0


advantage = partial(credit.advantage, "cure", norm=False)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_against_a_slow_version(seed, norm):
    batch = random_batch(seed)
    result = advantage(batch.outcomes, batch.segment_ids, batch.index, batch.mask, norm=norm)
    for i, row in enumerate(batch.rows):
        group = [j for j in range(len(batch.rows)) if batch.index[j] == batch.index[i]]
        expected = batch.outcomes[i] - batch.outcomes[group].mean()
        if norm:
            expected /= batch.outcomes[group].std(ddof=1) + 1e-6
        for position in range(result.shape[1]):
            places = [batch.place[j] for j in group if batch.rows[j][: position + 1] == row[: position + 1]]
            is_first = position < len(row) and batch.place[i] == min(places)
            value = expected * batch.mask[i, position].item() if is_first else 0
            assert result[i, position].item() == pytest.approx(value, abs=1e-9)
