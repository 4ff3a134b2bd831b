"""The number walk's reward against hand-given verdicts, and against hostile answers with a clock."""

import json
import time

import numpy as np
import pytest

from recipe.tasks.walk.reward import apply, check_row, compute_score
from tests.tables import table

TRUTH = {"start": 3, "target": 22, "steps": 4, "operations": ["+5", "*2", "-3"], "limit": 99}
RIGHT = "3*2=6\n6*2=12\n12+5=17\n17+5=22"


def score(answer: str, **options) -> dict:
    return compute_score("walk", answer, TRUTH, **options)


@pytest.mark.parametrize(("answer", "acc", "format_"), table(__file__, "verdicts"))
def test_hand_given_verdicts(answer, acc, format_):
    result = score(answer)
    assert (result["acc"], result["format"], result["score"]) == (acc, format_, float(acc))
    assert score(answer, format_score=0.1)["score"] == (1.0 if acc else 0.1 * format_)


def test_numbers_stay_between_zero_and_the_limit():
    assert compute_score("walk", RIGHT, TRUTH | {"limit": 22})["acc"] == 1.0
    assert compute_score("walk", RIGHT, TRUTH | {"limit": 21})["format"] == 0.0
    assert [apply("*2", value, 10) for value in (5, 6)] == [10, None]
    assert [apply("-3", value, 10) for value in (3, 2)] == [0, None]
    assert [apply("/3", value, 10) for value in (6, 7)] == [2, None] and apply("/0", 6, 10) is None


def test_a_vote_is_the_path_and_broken_walks_do_not_vote():
    assert score(RIGHT)["pred"] == "*2 *2 +5 +5"
    assert score("3+5=8\n8*2=16\n16+5=21\n21-3=18")["pred"] == "+5 *2 +5 -3"
    assert score("3*2=6\n6+5=11\n11*2=22")["pred"] == ""


@pytest.mark.parametrize(
    "response",
    [
        "<answer>" * 200_000,
        "</answer>" * 200_000,
        "<answer>" + "x" * 5_000_000,
        "3*2=6\n" * 1_000_000,
        "9" * 900 + "+" + "9" * 100,
        "\n" * 5_000_000,
        "٣*٢=٦\n" * 4,
        "3*2=6\x00\n6*2=12\n12+5=17\n17+5=22",
        None,
        b"x",
    ],
)
def test_hostile_responses_score_nothing_within_milliseconds(response):
    start = time.thread_time()
    assert score(response)["score"] == 0.0
    assert time.thread_time() - start < 0.05


@pytest.mark.parametrize(("truth", "message"), table(__file__, "refused rows"))
def test_a_row_is_refused_before_a_run_as_it_is_by_the_reward(truth, message):
    for refuse in (lambda: check_row("walk", truth), lambda: compute_score("walk", "3+5=8", truth)):
        with pytest.raises(ValueError, match=message):
            refuse()


def test_good_rows_are_not_refused():
    arrays = TRUTH | {"operations": np.array(TRUTH["operations"]), "target": np.int64(22)}  # as pandas reads parquet
    for truth in (TRUTH, arrays, json.dumps(TRUTH), TRUTH | {"start": 3.0}):
        check_row("walk", truth, None, format_score=0.1)
