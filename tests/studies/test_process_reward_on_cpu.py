"""The process reward's other uses, on a walk that is computed by hand: from 3 to 7 in 2 steps by +1 and *2."""

import pytest

from recipe.hato.local_reward import Step
from recipe.tasks.walk.data import can_arrive
from studies.process_reward import ERRORS, can_arrive_with_errors, compute_score
from tests.tables import table

TRUTH = {"start": 3, "target": 7, "steps": 2, "operations": ["+1", "*2"], "limit": 99}


@pytest.mark.parametrize(("walk", "score", "acc"), table(__file__, "walks"))
def test_half_of_the_reward_is_of_the_steps(walk, score, acc):
    result = compute_score("walk", walk, TRUTH)
    assert (result["score"], result["acc"]) == (score, acc)


def test_the_erring_judge_errs_as_often_as_it_says_and_always_in_the_same_places():
    step = Step(problem="3>7 2: +1 *2\n", before="", parent="", tokens="3*2=6\n", decode="".join)
    assert can_arrive(step) == 1
    wrong = 0
    for number in range(1000):  # a number with leading zeros is another text and the same problem
        same = Step(problem=f"{'0' * number}3>7 2: +1 *2\n", before="", parent="", tokens="3*2=6\n", decode="".join)
        verdict = can_arrive_with_errors(same)
        assert verdict == can_arrive_with_errors(same)
        wrong += verdict != can_arrive(same)
    assert wrong / 1000 == pytest.approx(ERRORS, abs=0.04)
