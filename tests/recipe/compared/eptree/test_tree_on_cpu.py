"""EPTree forks the tokens with the highest entropy, keeps calls and results of the shared past, and stores it once."""

import math

import pytest

from recipe.compared.eptree.tree import EPTreeKeys, Policy
from tests.recipe.arpo.toy_agent import TOKENIZER, ToyPolicy, library, library_tools
from tests.recipe.compared.engines import CHAT, Recorder, grown_by
from tests.workers.rollout.toy_engine import EOS, HashEngine


def grown(engine, of_builder=None, **keys):
    keys = EPTreeKeys(**keys)
    return grown_by(Policy(keys), engine, keys.M * (1 + keys.N * keys.L * keys.T), **(of_builder or {}))


def slow_choice(rows, entropy_of, forked, n, exclude_last):
    """The n undrawn prefixes of the rows after which the model is least sure; the first row through one decides."""
    entropies, seen = {}, set()
    for row in rows:
        for at in range(len(row)):
            prefix = tuple(row[:at])
            if prefix not in seen and at < len(row) - exclude_last and row[at] != EOS and prefix not in forked:
                entropies[prefix] = entropy_of(prefix)
            seen.add(prefix)
    return sorted(entropies, key=entropies.get, reverse=True)[:n]


SHAPES = [{"M": 2, "N": 2, "L": 1, "T": 2}, {"M": 1, "N": 3, "L": 3, "T": 2}, {"M": 3, "N": 1, "L": 2, "T": 1}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("exclude_last", [0, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_tokens_with_the_highest_entropy_fork(seed, exclude_last, shape):
    engine = Recorder(HashEngine(sharpness=3, memory=100))
    rows = grown(engine, {"seed": seed}, exclude_last=exclude_last, **shape).trajectories()

    def entropy_of(prefix):
        return -sum(p * math.log(p) for p in engine.engine.probabilities([1, 2, 3, *prefix]))

    expected, of_tree = [[]] * shape["M"], len(rows) // shape["M"]
    for start in range(0, len(rows), of_tree):
        forked, known = set(), 1
        for _ in range(shape["L"]):
            chosen = slow_choice(rows[start : start + known], entropy_of, forked, shape["N"], exclude_last)
            forked |= set(chosen)
            chosen += [()] * (shape["N"] - len(chosen))
            for prefix in [prefix for prefix in chosen for _ in range(shape["T"])]:
                assert tuple(rows[start + known][: len(prefix)]) == prefix
                expected.append(list(prefix))
                known += 1
        assert known == of_tree
    assert sorted(engine.asked) == sorted((1, 2, 3, *prefix) for prefix in expected)


@pytest.mark.parametrize("seed", range(5))
def test_shared_tokens_are_stored_once(seed):
    engine = HashEngine(sharpness=2)
    tree = grown(engine, {"seed": seed}, M=3, N=3, L=2, T=2)
    rows = tree.trajectories()
    prefixes = {tuple(row[: at + 1]) for row in rows for at in range(len(row))}
    assert sum(len(segment.token_ids) for segment in tree.segments) == len(prefixes)
    assert tree.metrics["shared_tokens"] == pytest.approx(1 - len(prefixes) / sum(map(len, rows)))
    assert all(segment.info.entropies is None for segment in tree.segments)


def test_short_trajectories_are_followed_by_others_from_the_prompt():
    engine = Recorder(HashEngine())
    tree = grown(engine, {"max_tokens": 3}, M=2, N=2, L=1, T=2)
    assert engine.asked == [(1, 2, 3)] * 10 and tree.metrics["forked_tokens"] == 0


# ---- with tools ----


def test_a_fork_after_a_result_keeps_the_call():
    """The model is sure before the first result and unsure afterwards: the first tokens after it fork."""
    tools = library()
    builder = {"prompt": CHAT, "environment": library_tools(tools), "max_tokens": 400}
    builder |= {"stop": TOKENIZER.eos_token_id, "vocab_size": len(TOKENIZER)}
    tree = grown(ToyPolicy(calls=2), builder, M=2, N=1, L=1, T=3, exclude_last=0)
    texts = [TOKENIZER.decode(row) for row in tree.trajectories()]
    for start in (0, 4):
        first, *forks = texts[start : start + 4]
        shared = first[: first.index("</result>") + len("</result>")]
        assert all(text.startswith(shared) and text.count("<result>") == 2 for text in forks)
        # the letter that a turn begins with is drawn anew
        assert len({text[len(shared)] for text in (first, *forks)}) > 1
    # in each tree the first call, and a second one for each text that differs from then on
    assert len(tools.tools["search"].asked) == 2 * (2 + 3)
    assert tree.metrics["fork_entropy"] == pytest.approx(math.log(4))
