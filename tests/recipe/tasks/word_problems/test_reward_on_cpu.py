"""The reward on a response's last number against hand-given verdicts, and against long responses with a clock."""

import time

import pytest

from recipe.tasks.word_problems.reward import check_row, compute_score


def right(response, truth="24") -> float:
    return compute_score("word_problems", response, truth)["acc"]


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("12 - 4 = 8. 8 * 3 = 24.", "24", 1.0),
        ("24", 24, 1.0),
        ("The answer is **24** marbles", "24", 1.0),
        ("$24.00", "24", 1.0),
        ("It is 1,250 dollars.", "1250", 1.0),
        ("2,4", "24", 0.0),  # no thousands
        ("1,2505", "1250", 0.0),
        ("024", "24", 1.0),
        ("24 or 25", "24", 0.0),  # the last one counts
        ("24 of the 30 marbles", "24", 0.0),
        ("240", "24", 0.0),
        ("24.5", "24", 0.0),
        ("24.000000000000000001", "24", 0.0),  # not as floating point
        ("-24", "24", 0.0),
        ("a debt of -24", "-24", 1.0),
        ("a debt of \u221224", "-24", 1.0),
        ("30-6", "6", 1.0),  # an operator, no sign
        ("(5+1)-6", "6", 1.0),
        ("48/2", "2", 0.0),  # a fraction is a number
        ("3/4", "0.75", 1.0),
        ("24/0", "24", 0.0),
        (r"\boxed{24}, as 12 * 2 > 20", "24", 1.0),
        (r"First \boxed{3}, then \boxed{24 \text{ marbles}}", "24", 1.0),
        (r"24, so \boxed{x}", "24", 0.0),  # the box has no number
        (r"24 \boxed{25", "25", 1.0),  # a box that does not close is none
        (r"\boxed{\frac{3}{4}}", "4", 0.0),
        (r"\boxed{-\dfrac{3}{4}}", "-0.75", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        (r"\boxed{1\,000}", "1000", 1.0),
        ("It is 1,000, I think", "1000", 1.0),
        ("it is .5", "0.5", 1.0),
        ("it is .5", "5", 0.0),
        ("5,6/7", "6/7", 1.0),
        ("6/7,8", "8", 1.0),
        ("twenty-four", "24", 0.0),
        ("", "24", 0.0),
        (None, "24", 0.0),
        ("9" * 40, "9" * 32, 0.0),
    ],
)
def test_verdicts(response, truth, expected):
    assert right(response, truth) == expected


def test_equal_answers_vote_together():
    votes = [compute_score("x", text, "1")["pred"] for text in ("24.0", "so 24", r"\boxed{48/2}", "none", "7")]
    assert votes == ["24", "24", "24", "", "7"]


@pytest.mark.parametrize("truth", ["", "none", None, "1/0"])
def test_a_truth_without_number_is_told(truth):
    with pytest.raises(ValueError, match="ground_truth of a word_problems problem must be a number"):
        right("24", truth)


@pytest.mark.parametrize(
    "text", ["1", "1,", "1,111", "111,", r"\frac{1", "1{,}", ".1", "1/", "-", "1.", r"\boxed{", "{1", "1 "]
)
def test_long_responses_are_scored_at_once(text):
    start = time.process_time()
    right(text * (200_000 // len(text)))
    assert time.process_time() - start < 1


@pytest.mark.parametrize("truth", ["", " ", "none", [4], {"target": [4]}, None])
def test_a_row_is_refused_before_a_run_as_it_is_by_the_reward(truth):
    for refuse in (lambda: check_row("sums", truth), lambda: compute_score("sums", "4", truth)):
        with pytest.raises(ValueError, match="ground_truth of a sums problem must be a number"):
            refuse()
    for good in (4, 4.5, "1,000", "3/4"):
        check_row("sums", good)
