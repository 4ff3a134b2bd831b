"""Arithmetic word problems in English with one to three operations, for a small pretrained model.

    python -m recipe.tasks.word_problems.data --output-dir outputs/data/word_problems

writes train.parquet, valid.parquet and test.parquet in verl's format. A problem with two operations and the answer 24:

    Tom has 12 marbles. He loses 4 marbles on the way home. Mei has 3 times as many. How many marbles does Mei have?

A problem consists of an opening, changes of a quantity, and an ending, which asks for the quantity; stories.yaml has
these lines. A line is a text and its operation ("": none): an opening with an operation means `a op b`, other lines
mean `quantity so far op b`.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from recipe.common.problem_files import (
    check_common_fields,
    draw_until,
    require,
    rl_row,
    run_maker,
    split_of,
    write_splits,
)

# split -> config field, in the order of writing: train.parquet is last, so if it exists, all files exist
SIZES = {"valid": "valid_size", "test": "test_size", "train": "train_size"}
HELD_OUT_SHARE = {"valid": 0.1, "test": 0.1}
INSTRUCTION = 'Calculate briefly, and end with "The answer is" and the number.'


@dataclass(frozen=True, kw_only=True)
class WordProblemsConfig:
    """Difficulty and size. Problems with `min_operations` to `max_operations`, 1 to 3, are equally frequent."""

    train_size: int = 5_000
    valid_size: int = 64
    test_size: int = 256
    min_operations: int = 1
    max_operations: int = 3
    max_number: int = 12  # largest initial number, and largest number that is added or subtracted
    max_factor: int = 5  # largest multiplier or divisor
    max_value: int = 100  # largest intermediate result or answer, and largest initial number that is divided
    operators: str = "+-*/"  # signs of the operations that occur, some of + - * /
    seed: int = 0

    def __post_init__(self):
        check_common_fields(self, SIZES.values())
        require(1 <= self.min_operations <= 3, "min_operations", self.min_operations, "1 to 3")
        most = self.max_operations
        require(self.min_operations <= most <= 3, "max_operations", most, "min_operations to 3")
        require(self.max_number >= 3, "max_number", self.max_number, "at least 3")
        require(self.max_factor >= 2, "max_factor", self.max_factor, "at least 2")
        require(self.max_value >= self.max_number, "max_value", self.max_value, "at least max_number")


Line = tuple[str, str]


class Story(NamedTuple):
    """Lines that fit together in any choice, and the things that they can be about."""

    openings: tuple[Line, ...]
    changes: tuple[Line, ...]
    endings: tuple[Line, ...]
    things: tuple[str, ...]


def story_of(parts: dict[str, list]) -> Story:
    kinds = ("openings", "changes", "endings")
    openings, changes, endings = (tuple((text, sign) for text, sign in parts[kind]) for kind in kinds)
    return Story(openings, changes, endings, tuple(parts["things"]))


_texts = yaml.safe_load(Path(__file__).with_name("stories.yaml").read_text(encoding="utf-8"))
WOMEN, MEN = (tuple(_texts[key]) for key in ("women", "men"))
STORIES: dict[str, Story] = {name: story_of(parts) for name, parts in _texts["stories"].items()}


class Problem(NamedTuple):
    """A story's lines and their numbers (two for an opening with an operation), without names and things yet."""

    story: str
    lines: tuple[Line, ...]
    numbers: tuple[int, ...]


def answer(problem: Problem) -> int | None:
    """Return the value after the last line; None if any value on the way is no positive whole number.

    >>> answer(Problem("bus", (("{a} and {b}", "+"), ("{b} leave", "-"), ("Groups of {b}?", "/")), (9, 5, 2, 4)))
    3
    """
    numbers = iter(problem.numbers)
    value = next(numbers)
    for _, operation in problem.lines:
        if not operation:
            continue
        operand = next(numbers)
        if operation == "/" and value % operand:
            return None
        value = {"+": value + operand, "-": value - operand, "*": value * operand, "/": value // operand}[operation]
        if value < 1:
            return None
    return value


def random_problem(config: WordProblemsConfig, n_operations: int, rng: random.Random) -> Problem | None:
    """Return a random problem with `n_operations` operations; None if the draw made none. No number in the text is the
    answer, so that copying a number is never right."""
    name = rng.choice(list(STORIES))
    story = STORIES[name]
    changes = rng.sample(story.changes, rng.randint(0, n_operations))
    lines = (rng.choice(story.openings), *changes, rng.choice(story.endings))
    operations = [operation for _, operation in lines if operation]
    if len(operations) != n_operations or not set(operations) <= set(config.operators):
        return None
    numbers = [_first_number(lines[0][1], config, rng)]
    numbers += [rng.randint(2, config.max_factor if o in "*/" else config.max_number) for o in operations]
    problem = Problem(name, lines, tuple(numbers))
    values = [answer(Problem(name, lines[:end], problem.numbers)) for end in range(1, len(lines) + 1)]
    reached = [value for value in values if value is not None]
    if len(reached) < len(lines) or max(numbers[0], *reached) > config.max_value or reached[-1] in numbers:
        return None
    return problem


def _first_number(operation: str, config: WordProblemsConfig, rng: random.Random) -> int:
    if operation == "/":
        return rng.randint(2, config.max_number) * rng.randint(2, config.max_factor)
    return rng.randint(2, config.max_factor if operation == "*" else config.max_number)


def content_of(problem: Problem) -> tuple[str, str, tuple[int, ...]]:
    """Return story, operations and numbers, which are equal for problems that differ only in their sentences."""
    return problem.story, "".join(operation for _, operation in problem.lines), problem.numbers


def draw_problems(config: WordProblemsConfig, split: str, rng: random.Random) -> list[Problem]:
    """Return the distinct problems of a split; the config sets their number."""
    kinds = config.max_operations - config.min_operations + 1
    return draw_until(
        lambda drawn: random_problem(config, config.min_operations + drawn % kinds, rng),
        lambda problem: split_of(content_of(problem), HELD_OUT_SHARE) == split,
        getattr(config, SIZES[split]),
        SIZES[split],
    )


def text_of(problem: Problem, rng: random.Random) -> str:
    """Return the problem in words, with random names and things."""
    words = _random_words(problem.story, rng)
    numbers = iter(problem.numbers)
    sentences = []
    for index, (text, operation) in enumerate(problem.lines):
        shown = {"a": next(numbers)} if index == 0 else {}
        if operation:
            shown["b"] = next(numbers)
        sentences.append(text.format_map({**words, **shown}))
    return " ".join(sentences)


def _random_words(story: str, rng: random.Random) -> Mapping[str, str]:
    people, (she, her, him) = rng.choice([(WOMEN, ("she", "her", "her")), (MEN, ("he", "his", "him"))])
    name = rng.choice(people)
    friend = rng.choice([other for other in WOMEN + MEN if other != name])
    words = {"name": name, "friend": friend, "she": she, "her": her, "him": him}
    words |= {"She": she.capitalize(), "Her": her.capitalize(), "things": rng.choice(STORIES[story].things)}
    return words


def row_of(problem: Problem, index: int, split: str, rng: random.Random) -> dict:
    """Return a row in verl's parquet format, with the number of operations."""
    question = f"{text_of(problem, rng)}\n\n{INSTRUCTION}"
    operations = len([operation for _, operation in problem.lines if operation])
    return rl_row("word_problems", question, str(answer(problem)), split, index, operations=operations)


def write_word_problems(output_dir: str | Path, config: WordProblemsConfig) -> dict[str, Path]:
    """Write the three files, see `write_splits`."""

    def rows_of(split: str, size: int) -> list[dict]:
        rng = random.Random(f"{config.seed}/{split}")
        problems = draw_problems(config, split, rng)
        return [row_of(problem, i, split, rng) for i, problem in enumerate(problems)]

    return write_splits(output_dir, config, SIZES, rows_of)


def main(arguments: list[str] | None = None) -> None:
    run_maker(__doc__, WordProblemsConfig, write_word_problems, SIZES, arguments=arguments)


if __name__ == "__main__":
    main()
