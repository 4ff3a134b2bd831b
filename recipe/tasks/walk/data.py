"""Number walks: go from a start to a target in a fixed number of steps. Problems, demonstrations, and a tiny model.

    python -m recipe.tasks.walk.data --output-dir outputs/data/walk --model-dir outputs/walk_model

A problem is `3>22 4: +1 *2 -1` (from 3 to 22 in 4 steps by these operations), an answer has a line for each step:
`3*2=6`, `6*2=12`, `12-1=11`, `11*2=22`. Each line is a decision; only few of the sequences of operations end at the
target. It writes train, valid and test in verl's format (no problem is in two of them), and sft.parquet with
demonstrations of 1 to `max_steps` steps for a warm start. They teach the rules, but only some of the search; the rest
is left to RL. The share `demo_correct` of the demonstrations ends at the target, the others at any number.
"""

import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
from recipe.common.tiny_model import model_of_1_3_million
from recipe.tasks.walk.reward import BrokenRule, apply, follow

# split -> config field, in the order of writing: train.parquet is last, so if it exists, all files exist
SIZES = {"valid": "valid_size", "test": "test_size", "sft": "demo_size", "train": "train_size"}
HELD_OUT = {"valid": 0.1, "test": 0.1}  # shares of all problems
SHORT = re.compile(r"(\d+)>(\d+) (\d+):((?: [-+*/]\d+)+)")  # a prompt in style "short"
# a model of 1.3 million parameters for which every number of a walk is one token
MODEL = model_of_1_3_million([*map(str, range(10, 100))])


@dataclass(frozen=True, kw_only=True)
class WalkConfig:
    """Difficulty and size. A model of a million parameters learns the defaults in minutes. A problem has an operation
    for each sign in `operators`, in this order: `+*-` may become `+5 *2 -3`."""

    train_size: int = 800
    valid_size: int = 96
    test_size: int = 96
    demo_size: int = 16_000
    demo_correct: float = 0.6
    min_steps: int = 4
    max_steps: int = 6
    max_start: int = 20
    operators: str = "+*-"
    max_operand: int = 1  # largest operand of + and -
    max_factor: int = 2  # largest operand of * and /
    limit: int = 40  # largest number of a walk; its numbers are whole and at least 0
    max_share: float = 0.1  # largest share of the possible sequences of operations that may end at the target
    style: str = "short"  # style of the prompt, see `walk_text`
    seed: int = 0

    def __post_init__(self):
        check_common_fields(self, SIZES.values())
        require(1 <= self.min_steps, "min_steps", self.min_steps, "at least 1")
        require(self.min_steps <= self.max_steps <= 12, "max_steps", self.max_steps, "min_steps to 12")
        require(2 <= self.max_factor, "max_factor", self.max_factor, "at least 2")
        require(1 <= self.max_operand, "max_operand", self.max_operand, "at least 1")
        require(1 <= self.max_start <= self.limit, "max_start", self.max_start, "1 to limit")
        require(0 < self.max_share <= 1, "max_share", self.max_share, "above 0, at most 1")
        require(len(self.operators) > 1, "operators", self.operators, "at least two of + - * /")


class Problem(NamedTuple):
    """A walk from `start` to `target` in `steps` steps, each by one of `operations`, within 0 to `limit`."""

    start: int
    target: int
    steps: int
    operations: tuple[str, ...]
    limit: int

    def truth(self) -> dict:
        """Return the ground truth that `recipe.tasks.walk.reward.compute_score` takes."""
        return self._asdict() | {"operations": list(self.operations)}


def walk_text(truth: Mapping, style: str) -> str:
    """Return the prompt of a number walk from a ground truth: a few tokens (`short`), or full instructions (`long`)."""
    operations = " ".join(truth["operations"])
    if style == "short":
        return f"{truth['start']}>{truth['target']} {truth['steps']}: {operations}"
    return (
        f"Start at {truth['start']} and reach {truth['target']} in exactly {truth['steps']} steps. Each step is one of "
        f"the operations {operations}, and each may be used any number of times. All numbers must be whole and lie "
        f"between 0 and {truth['limit']}. Think first, then write one step a line between tags, as in "
        "<answer>\n3 + 5 = 8\n8 * 2 = 16\n</answer>."
    )


def ends(problem: Problem) -> Counter[int]:
    """Return number -> count of the sequences of operations that end there, whatever the target is."""
    counts = Counter({problem.start: 1})
    for _ in range(problem.steps):
        after: Counter[int] = Counter()
        for value, count in counts.items():
            for operation in problem.operations:
                result = apply(operation, value, problem.limit)
                if result is not None:
                    after[result] += count
        counts = after
    return counts


def random_walk(problem: Problem, right: bool, rng: random.Random) -> str:
    """Return the lines of a walk, drawn uniformly from all possible walks (if `right`, from those to the target)."""
    counts: dict[tuple[int, int], int] = {}

    def completions(value: int, steps: int) -> int:
        """Return the number of ways in which a walk can continue from `value` for `steps` steps."""
        if steps == 0:
            return int(not right or value == problem.target)
        if (value, steps) not in counts:
            counts[value, steps] = sum(completions(result, steps - 1) for _, result in moves(value))
        return counts[value, steps]

    def moves(value: int) -> list[tuple[str, int]]:
        results = ((operation, apply(operation, value, problem.limit)) for operation in problem.operations)
        return [(operation, result) for operation, result in results if result is not None]

    value, lines = problem.start, []
    for steps in reversed(range(problem.steps)):
        choices = moves(value)
        weights = [completions(result, steps) for _, result in choices]
        operation, result = rng.choices(choices, weights)[0]
        lines.append(f"{value}{operation}={result}")
        value = result
    return "\n".join(lines)


def can_arrive(step) -> float:
    """Return 1 if a walk keeps the rules so far and can still end at its target, else 0: a perfect process reward model
    for `hato.local_reward=recipe.tasks.walk.data.can_arrive`. The problems need short prompts and the default `limit`.
    """
    question = SHORT.search(step.decode(step.problem))
    if question is None:
        raise ValueError(
            "hato.local_reward=recipe.tasks.walk.data.can_arrive: expected a number walk with a short prompt"
        )
    start, target, steps, operations = question.groups()
    problem = Problem(int(start), int(target), int(steps), tuple(operations.split()), WalkConfig.limit)
    walk = step.decode([*step.before, *step.tokens]).partition("<|")[0]  # This removes the end token.
    n_lines = sum(bool(line) for line in walk.splitlines())
    try:
        _, value = follow(walk, problem.truth() | {"steps": n_lines})
    except BrokenRule:
        return 0.0
    left = problem._replace(start=value, steps=problem.steps - n_lines)
    return float(left.steps >= 0 and ends(left)[left.target] > 0)


def random_problem(config: WalkConfig, steps: int, max_share: float, rng: random.Random) -> Problem | None:
    """Return a random problem whose target at most the share `max_share` of sequences reaches; None if a draw fails."""
    highest = {"+": config.max_operand, "-": config.max_operand, "*": config.max_factor, "/": config.max_factor}
    operations = tuple(f"{sign}{rng.randint(2 if sign in '*/' else 1, highest[sign])}" for sign in config.operators)
    start = rng.randint(1, config.max_start)
    problem = Problem(start, -1, steps, operations, config.limit)
    counts = ends(problem)
    rare = [end for end, count in sorted(counts.items()) if count <= max_share * counts.total() and end != start]
    if not rare or len(set(operations)) < len(operations):
        return None
    return problem._replace(target=rng.choices(rare, [counts[end] for end in rare])[0])


def draw_problems(config: WalkConfig, split: str, size: int, rng: random.Random) -> list[Problem]:
    """Return `size` distinct problems of a split, whose numbers of steps cycle from `min_steps` to `max_steps`."""
    numbers_of_steps = config.max_steps - config.min_steps + 1
    return draw_until(
        lambda drawn: random_problem(config, config.min_steps + drawn % numbers_of_steps, config.max_share, rng),
        lambda problem: split_of(problem, HELD_OUT) == split,
        size,
        SIZES[split],
    )


def demonstration(config: WalkConfig, rng: random.Random) -> dict:
    """Return a conversation for the SFT trainer about a problem of 1 to `max_steps` steps that is not held out."""
    steps, problem = rng.randint(1, config.max_steps), None
    while problem is None or (steps >= config.min_steps and split_of(problem, HELD_OUT) != "train"):
        problem = random_problem(config, steps, 1.0, rng)
    walk = random_walk(problem, rng.random() < config.demo_correct, rng)
    # The long prompt asks for tags.
    answer = walk if config.style == "short" else f"<answer>\n{walk}\n</answer>"
    return conversation(walk_text(problem.truth(), config.style), answer)


def write_walks(output_dir: str | Path, config: WalkConfig) -> dict[str, Path]:
    """Write the four files, see `write_splits`."""

    def rows_of(split: str, size: int) -> list[dict]:
        rng = random.Random(f"{config.seed} {split}")
        if split == "sft":
            return [demonstration(config, rng) for _ in range(size)]
        return [
            rl_row("walk", walk_text(problem.truth(), config.style), problem.truth(), split, i)
            for i, problem in enumerate(draw_problems(config, split, size, rng))
        ]

    return write_splits(output_dir, config, SIZES, rows_of)


def main(arguments: list[str] | None = None) -> None:
    run_maker(__doc__, WalkConfig, write_walks, SIZES, {"model-dir": MODEL}, arguments)


if __name__ == "__main__":
    main()
