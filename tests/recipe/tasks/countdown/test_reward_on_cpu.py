"""Countdown's reward against hand-given verdicts, and against hostile answers with a clock."""

import ast
import random
import re
import time
from fractions import Fraction

import pytest

from recipe.tasks.countdown.reward import NotAnExpression, compute_score, evaluate
from tests.tables import table

TRUTH = {"target": 14, "numbers": [2, 3, 4]}


def score(answer: str, truth=TRUTH) -> dict:
    return compute_score("countdown", f"<answer>{answer}</answer>", truth)


@pytest.mark.parametrize(("answer", "expected"), table(__file__, "verdicts"))
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


@pytest.mark.parametrize(
    "response",
    [
        *("<answer>" * 200_000, "</answer>" * 200_000, "<answer>" + "x" * 5_000_000, None, b"x"),
        "<answer>9**9**9**9</answer>",
        *(
            f"<answer>{answer}</answer>"
            for answer in (
                "9" * 200 + "*" + "9" * 40,
                "(" * 100_000 + "1" + ")" * 100_000,
                "-" * 200 + "1",
                "1+" * 5_000_000 + "1",
                *("٣*٤+٢", "³*4+2", "\x00" * 1000, "3*4+2\x00", "3*4\n+2"),
            )
        ),
    ],
)
def test_hostile_responses_score_nothing_within_milliseconds(response):
    start = time.thread_time()
    assert compute_score("countdown", response, TRUTH)["score"] == 0.0
    assert time.thread_time() - start < 0.05


def random_expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return str(rng.choice([0, 1, 2, 3, 7, 25, 100, 9876]))
    left, right = (random_expression(rng, depth - 1) for _ in range(2))
    text = rng.choice(["{} + {}", "{}-{}", "{}*{}", "{} /{}", "({}+{})", "( {} - {})", "({}*{} )", "({}/{})"])
    return text.format(left, right)


def value_by_python(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value that Python gives to the expression with every integer a Fraction; None where it has none."""
    numbers = [int(number) for number in re.findall(r"\d+", expression)]
    try:
        ast.parse(expression.strip(), mode="eval")  # refuses 07, which the rewritten text would not show
        value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression.strip()), {"Fraction": Fraction})
    except (SyntaxError, ZeroDivisionError, TypeError):
        return None
    return value, numbers


def value_by_evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    try:
        return evaluate(expression)
    except NotAnExpression:
        return None


def test_values_are_pythons_for_random_expressions():
    rng = random.Random(0)
    expressions = [random_expression(rng, rng.randint(1, 4)) for _ in range(5000)]
    expressions = [expression for expression in expressions if len(expression) <= 256]
    assert len(expressions) > 4000
    for expression in expressions:
        assert value_by_evaluate(expression) == value_by_python(expression), expression


def test_damaged_expressions_are_refused_where_python_refuses_them():
    """Random edits of expressions; a sign before a number, a power or a floor division is Python's alone."""
    rng = random.Random(1)
    for _ in range(5000):
        text = random_expression(rng, 2)
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(["", *"0123+-*/() "]) + text[place + rng.randint(0, 1) :]
        is_pythons_alone = re.search(r"(^|[-+*/(]) *[-+]|\*\*|//", text) is not None
        calls = re.search(r"[\d)] *\(", text) is not None
        expected = None if is_pythons_alone or calls else value_by_python(text)
        assert value_by_evaluate(text) == expected, text
