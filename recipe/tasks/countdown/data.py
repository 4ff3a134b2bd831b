"""Countdown: use every number once to reach the target. Problems and demonstrations.

    python -m recipe.tasks.countdown.data --output-dir outputs/data/countdown

writes train.parquet and test.parquet in verl's format, and sft.parquet with demonstrations for a warm start. Only the
share `demo_correct` of these is right: a model trained on right answers alone leaves RL nothing to find quickly.
"""

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from recipe.common.problem_files import (
    check_common_fields,
    conversation,
    draw_until,
    require,
    rl_row,
    run_maker,
    split_of,
    write_splits,
)
from recipe.tasks.countdown.reward import NotAnExpression, evaluate

SIZES = {"sft": "demo_size", "test": "test_size", "train": "train_size"}
TEST_SHARE = 0.2
TRIES = 100  # random expressions that are tried for a right demonstration of a problem
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
Problem = tuple[tuple[int, ...], int]  # numbers in ascending order, target


@dataclass(frozen=True, kw_only=True)
class CountdownConfig:
    """Difficulty and size. A model of under a million parameters learns the defaults in minutes."""

    train_size: int = 10_000
    test_size: int = 64
    demo_size: int = 14_400
    demo_correct: float = 0.4  # share of the demonstrations that are right
    min_numbers: int = 3
    max_numbers: int = 3
    min_number: int = 1
    max_number: int = 9
    min_target: int = 1
    max_target: int = 30
    operators: str = "+-"  # signs of the operations that may occur, some of + - * /
    style: str = "short"  # style of the prompt, see `countdown_text`
    seed: int = 0

    def __post_init__(self):
        check_common_fields(self, SIZES.values())
        require(2 <= self.min_numbers <= 4, "min_numbers", self.min_numbers, "2 to 4")
        require(self.min_numbers <= self.max_numbers <= 4, "max_numbers", self.max_numbers, "min_numbers to 4")
        require(1 <= self.min_number, "min_number", self.min_number, "at least 1")
        require(self.min_number <= self.max_number, "max_number", self.max_number, "at least min_number")
        require(self.min_target <= self.max_target, "max_target", self.max_target, "at least min_target")


def countdown_text(numbers: Sequence[int], target: int, operators: str, style: str) -> str:
    """Return the prompt of Countdown: a few bytes for a byte-level model (`short`), or full instructions (`long`)."""
    if style == "short":
        return f"{' '.join(map(str, numbers))} = {target}"
    return (
        f"Reach {target} with the numbers {', '.join(map(str, numbers))}. Use each of them exactly once, and only the "
        f"operations {' '.join(operators)} with parentheses where needed. Think first, then give the expression alone "
        "between tags, as in <answer>(1 + 2) * 3</answer>."
    )


def random_expression(numbers: Sequence[int], operators: str, rng: random.Random) -> str | None:
    """Return a random expression without parentheses; None if it divides by zero."""
    order = rng.sample(list(numbers), len(numbers))
    text = str(order[0]) + "".join(f"{rng.choice(operators)}{n}" for n in order[1:])
    try:
        evaluate(text)
    except NotAnExpression:
        return None
    return text


def random_problem(config: CountdownConfig, rng: random.Random) -> Problem | None:
    """Return a problem whose target is the value of a random expression; None if that value is no allowed target."""
    count = rng.randint(config.min_numbers, config.max_numbers)
    values = [Fraction(rng.randint(config.min_number, config.max_number)) for _ in range(count)]
    numbers = tuple(sorted(map(int, values)))
    while len(values) > 1:
        left, right = (values.pop(rng.randrange(len(values))) for _ in range(2))
        symbol = rng.choice(config.operators)
        if symbol == "/" and right == 0:
            return None
        values.append(_OPERATIONS[symbol](left, right))
    value = values[0]
    if value.denominator != 1 or not config.min_target <= value <= config.max_target:
        return None
    return numbers, int(value)


def draw_problems(config: CountdownConfig, size: int, test: bool, rng: random.Random) -> list[Problem]:
    """Return `size` problems of the test split, which are distinct, or of the training split, which may repeat."""
    return draw_until(
        lambda _: random_problem(config, rng),
        lambda problem: (split_of(problem, {"test": TEST_SHARE}) == "test") == test,
        size,
        "test_size" if test else "train_size",
        repeats=not test,
    )


def row_of(problem: Problem, index: int, split: str, config: CountdownConfig, rng: random.Random) -> dict:
    """Return a row in verl's parquet format; the numbers are shown in random order."""
    numbers, target = problem
    shown = rng.sample(numbers, len(numbers))
    question = countdown_text(shown, target, config.operators, config.style)
    return rl_row("countdown", question, {"target": target, "numbers": list(shown)}, split, index)


def right_expression(problem: Problem, operators: str, rng: random.Random) -> str | None:
    """Return the first right one of `TRIES` random expressions; None if none is right."""
    tries = (random_expression(problem[0], operators, rng) for _ in range(TRIES))
    return next((text for text in tries if text and evaluate(text)[0] == problem[1]), None)


def demonstration(problem: Problem, config: CountdownConfig, rng: random.Random) -> dict:
    """Return a conversation, right with probability `demo_correct`, else with a random expression, seldom right. A
    right one is about another problem if no expression without parentheses is found for this one."""
    shown = rng.sample(problem[0], len(problem[0]))
    expression = None
    if rng.random() < config.demo_correct:
        while (expression := right_expression(problem, config.operators, rng)) is None:
            (problem,) = draw_problems(config, 1, False, rng)
            shown = rng.sample(problem[0], len(problem[0]))
    numbers, target = problem
    while expression is None:
        expression = random_expression(numbers, config.operators, rng)
    question = countdown_text(shown, target, config.operators, config.style)
    return conversation(question, f"<answer>{expression}</answer>")


def write_countdown(output_dir: str | Path, config: CountdownConfig) -> dict[str, Path]:
    """Write the three files, see `write_splits`."""
    rng = random.Random(config.seed)
    test = draw_problems(config, config.test_size, True, rng)
    train = draw_problems(config, config.train_size, False, rng)
    demos = draw_problems(config, config.demo_size, False, rng)
    rows = {
        "test": [row_of(p, i, "test", config, rng) for i, p in enumerate(test)],
        "train": [row_of(p, i, "train", config, rng) for i, p in enumerate(train)],
        "sft": [demonstration(p, config, rng) for p in demos],
    }
    return write_splits(output_dir, config, SIZES, lambda split, size: rows[split])


def main(arguments: list[str] | None = None) -> None:
    run_maker(__doc__, CountdownConfig, write_countdown, SIZES, arguments=arguments)


if __name__ == "__main__":
    main()
