"""Countdown problems against a solver written the slow way: every order, operator and bracketing, with `eval`."""

import itertools
import random
from fractions import Fraction

import pandas as pd
import pytest

from recipe.tasks.countdown.data import CountdownConfig, main, solve, write_countdown
from recipe.tasks.countdown.reward import compute_score

SHAPES = {
    2: ["{0}{4}{1}"],
    3: ["({0}{4}{1}){5}{2}", "{0}{4}({1}{5}{2})"],
    4: [
        "(({0}{4}{1}){5}{2}){6}{3}",
        "({0}{4}({1}{5}{2})){6}{3}",
        "({0}{4}{1}){5}({2}{6}{3})",
        "{0}{4}(({1}{5}{2}){6}{3})",
        "{0}{4}({1}{5}({2}{6}{3}))",
    ],
}


def reachable_slowly(numbers, operators) -> set:
    values = set()
    for order in set(itertools.permutations(numbers)):
        for chosen in itertools.product(operators, repeat=len(numbers) - 1):
            for shape in SHAPES[len(numbers)]:
                parts = [f"Fraction({n})" for n in order] + [""] * (4 - len(order)) + list(chosen)
                try:
                    values.add(eval(shape.format(*parts)))
                except ZeroDivisionError:
                    pass
    return values


@pytest.mark.parametrize(("count", "operators"), [(2, "+-*/"), (3, "+-*/"), (3, "+-"), (4, "+-*"), (4, "+-*/")])
def test_solver_finds_exactly_what_is_reachable(count, operators):
    rng = random.Random(count)
    for _ in range(3 if count < 4 else 1):
        numbers = [rng.randint(1, 13) for _ in range(count)]
        reachable = reachable_slowly(numbers, operators)
        for target in range(-5, 40):
            solution = solve(numbers, target, operators)
            assert (solution is not None) == (Fraction(target) in reachable), (numbers, target, solution)
            if solution:
                truth = {"target": target, "numbers": numbers}
                assert compute_score("countdown", f"<answer>{solution}</answer>", truth)["acc"] == 1.0


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
