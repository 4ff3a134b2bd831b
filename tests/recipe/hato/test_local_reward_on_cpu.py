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

PROBLEM = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("before", "parent", "tokens", "expected_coherence", "expected_progress"),
    [
        ([], PROBLEM, [1, 2, 3], 1.0, 0.0),  # repeats the problem
        ([], PROBLEM, [8, 9, 7], 0.0, 1.0),  # speaks of something else
        ([], PROBLEM, [1, 3, 9], 2 / 3, 1.0),
        ([5, 6, 7], [6, 7], [6, 7, 5], 2 / 3, 1 / 2),  # (6, 7) was said before; 5 is not in the parent
        ([], PROBLEM, [9], 0.0, 1.0),
        ([9], [9], [9], 1.0, 0.0),
        ([], PROBLEM, [], 0.0, 0.0),
    ],
)
def test_heuristics_by_hand(before, parent, tokens, expected_coherence, expected_progress):
    step = Step(problem=PROBLEM, before=before, parent=parent, tokens=tokens)
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
