"""Countdown's reward against hand-given verdicts, and against hostile answers with a clock."""

import time
from fractions import Fraction

import pytest

from verl.utils.reward_score.countdown import NotAnExpression, compute_score, evaluate

TRUTH = {"target": 14, "numbers": [2, 3, 4]}


def score(answer: str, truth=TRUTH) -> dict:
    return compute_score("countdown", f"<answer>{answer}</answer>", truth)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("3*4+2", 1.0),
        ("2 + 3 * 4", 1.0),
        ("(4*3)+2 = 14", 1.0),
        ("3×4+2", 1.0),
        ("(2+3)*4", 0.1),  # 20: the right numbers, the wrong value
        ("2-3-4", 0.1),
        ("4/(3-2)", 0.1),
        ("7+7", 0.0),  # other numbers
        ("3*4+2+0", 0.0),
        ("3*4", 0.0),  # a number left out
        ("3*4+2+2", 0.0),  # a number used twice
        ("34-2", 0.0),  # digits joined
        ("-2+4*3", 0.0),  # a sign is not an operation
        ("14", 0.0),
        ("", 0.0),
        ("3*4+", 0.0),
        ("3**4+2", 0.0),
        ("3*4+2.0", 0.0),
        ("3*4+0x2", 0.0),
        ("3*4+2_", 0.0),
        ("4(3)+2", 0.0),
        ("3*4/(2-2)", 0.0),
        ("3*4+2 #", 0.0),
        ("3*4+True", 0.0),
        ("__import__('os')", 0.0),
    ],
)
def test_hand_given_verdicts(answer, expected):
    assert score(answer)["score"] == expected
    assert score(answer)["acc"] == float(expected == 1.0)


def test_division_is_exact():
    truth = {"target": 24, "numbers": [3, 3, 8, 8]}
    assert score("8/(3-8/3)", truth)["acc"] == 1.0
    assert score("8/(3-8/3)", truth)["pred"] == "24"


def test_the_last_answer_counts():
    response = "<answer>3*4+2</answer> no, wait <answer>2+3+4</answer>"
    assert compute_score("countdown", response, TRUTH)["acc"] == 0.0
    assert compute_score("countdown", "3*4+2", TRUTH)["score"] == 0.0
    assert compute_score("countdown", "<answer>3*4+2", TRUTH)["score"] == 0.0


def test_votes_never_pool_with_answers_that_break_the_rules():
    assert score("3*4+2")["pred"] == score("2+4*3")["pred"] == "14"
    assert score("7+7")["pred"] == ""
    assert score("14")["pred"] == ""


def test_ground_truth_as_json_text():
    assert compute_score("countdown", "<answer>3*4+2</answer>", '{"target": 14, "numbers": [2, 3, 4]}')["acc"] == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "9" * 200 + "*" + "9" * 40,
        "(" * 100_000 + "1" + ")" * 100_000,
        "(" * 120 + "1" + ")" * 120,
        "-" * 200 + "1",
        "1+" * 5_000_000 + "1",
        "٣*٤+٢",
        "³*4+2",
        "\x00" * 1000,
        "3*4+2\x00",
        "\\" * 100,
        "3*4\n+2",
        "[" * 200,
    ],
)
def test_hostile_answers_score_nothing_within_milliseconds(answer):
    start = time.thread_time()
    result = score(answer)
    assert time.thread_time() - start < 0.05
    assert result["score"] == 0.0


@pytest.mark.parametrize(
    "response", ["<answer>" * 200_000, "</answer>" * 200_000, "<answer>" + "x" * 5_000_000, None, b"x"]
)
def test_hostile_responses(response):
    start = time.thread_time()
    assert compute_score("countdown", response, TRUTH)["score"] == 0.0
    assert time.thread_time() - start < 0.05


def test_evaluate_reads_numbers_in_order():
    assert evaluate("8/(3-8/3)") == (Fraction(24), [8, 3, 8, 3])
    with pytest.raises(NotAnExpression):
        evaluate("1/0")
