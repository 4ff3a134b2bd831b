"""Countdown: rewards by hand and hostile answers with a clock; problems that a solver finds solvable."""

import ast
import random
import re
import time
from fractions import Fraction

import pandas as pd
import pytest

from recipe.tasks.countdown.data import CountdownConfig, main, write_countdown
from recipe.tasks.countdown.reward import NotAnExpression, compute_score, evaluate
from tests.recipe.tasks.countdown.solver import solve
from tests.tables import table

TRUTH = {"target": 14, "numbers": [2, 3, 4]}


def score(answer: str, truth=TRUTH) -> dict:
    return compute_score("countdown", f"<answer>{answer}</answer>", truth)


@pytest.mark.parametrize(("answer", "expected"), table(__file__, "verdicts"))
def test_hand_given_verdicts(answer, expected):
    assert score(answer)["score"] == expected
    assert score(answer)["acc"] == float(expected == 1.0)


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


CONFIG = CountdownConfig(
    train_size=500, test_size=60, demo_size=600, min_numbers=2, max_numbers=4, operators="+-*/", max_target=60, seed=3
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    paths = write_countdown(tmp_path_factory.mktemp("countdown"), CONFIG)
    return {split: pd.read_parquet(path) for split, path in paths.items()}


def keys(frame) -> list:
    truths = [row["ground_truth"] for row in frame["reward_model"]]
    return [(tuple(sorted(truth["numbers"])), truth["target"]) for truth in truths]


def test_every_problem_is_solvable_and_splits_are_disjoint(written):
    train, test = keys(written["train"]), keys(written["test"])
    assert len(train) == 500 and len(test) == len(set(test)) == 60
    assert not set(train) & set(test)
    for numbers, target in {*train, *test}:
        assert solve(numbers, target, CONFIG.operators) is not None
        assert 2 <= len(numbers) <= 4 and 1 <= target <= 60


def test_demonstrations_use_the_numbers_and_are_right_as_often_as_asked(written):
    test_problems = set(keys(written["test"]))
    verdicts = []
    for messages in written["sft"]["messages"]:
        question, answer = (message["content"] for message in messages)
        numbers, target = question.split(" = ")
        truth = {"target": int(target), "numbers": [int(n) for n in numbers.split()]}
        assert (tuple(sorted(truth["numbers"])), truth["target"]) not in test_problems
        result = compute_score("countdown", answer, truth)
        assert result["format"] == 1.0
        verdicts.append(result["acc"])
    share = sum(verdicts) / len(verdicts)
    assert 0.35 < share < 0.55  # 0.4, plus the wrong ones that happen to be right


def test_too_small_a_space_is_an_error_not_an_endless_loop(tmp_path, capsys):
    with pytest.raises(SystemExit, match="test_size=5000"):
        main(["--output-dir", str(tmp_path), "--test-size", "5000", "--train-size", "10"])
    assert not list(tmp_path.glob("*.parquet"))
