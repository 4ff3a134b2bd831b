"""The reward on a response's last number against hand-given verdicts, and against long responses with a clock."""

import time

import pytest

from recipe.tasks.word_problems.reward import check_row, compute_score
from tests.tables import table


def right(response, truth="24") -> float:
    return compute_score("word_problems", response, truth)["acc"]


@pytest.mark.parametrize(("response", "truth", "expected"), table(__file__, "verdicts"))
def test_verdicts(response, truth, expected):
    assert right(response, truth) == expected


def test_equal_answers_vote_together():
    votes = [compute_score("x", text, "1")["pred"] for text in ("24.0", "so 24", r"\boxed{48/2}", "none", "7")]
    assert votes == ["24", "24", "24", "", "7"]


@pytest.mark.parametrize(
    "text", ["1", "1,", "1,111", "111,", r"\frac{1", "1{,}", ".1", "1/", "-", "1.", r"\boxed{", "{1", "1 "]
)
def test_long_responses_are_scored_at_once(text):
    start = time.process_time()
    right(text * (200_000 // len(text)))
    assert time.process_time() - start < 1


@pytest.mark.parametrize("truth", ["", " ", "none", [4], {"target": [4]}, None, "1/0"])
def test_a_row_is_refused_before_a_run_as_it_is_by_the_reward(truth):
    for refuse in (lambda: check_row("sums", truth), lambda: compute_score("sums", "4", truth)):
        with pytest.raises(ValueError, match="ground_truth of a sums problem must be a number"):
            refuse()
    for good in (4, 4.5, "1,000", "3/4"):
        check_row("sums", good)
