"""R_local by hand: the heuristic, a function of one's own, and what a function may return."""

import asyncio

import pytest

from recipe.hato.local_reward import (
    Step,
    coherence,
    heuristic,
    local_reward,
    local_reward_function,
    progress,
)
from tests.tables import table


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
