"""Number walks: from a start to a target in so many steps. Problems, demonstrations, and a tiny model that reads them.

    python -m recipe.common.tasks.walk --output-dir outputs/data/walk --model-dir outputs/walk_model

A problem is `3>22 4: +1 *2 -1` (from 3 to 22 in 4 steps by these operations), an answer has a line for each step:
`3*2=6`, `6*2=12`, `12-1=11`, `11*2=22`. Each line is a decision; only few of the sequences of operations end at the
target. Written: train, valid and test in verl's format (no problem is in two of them), and sft.parquet with
demonstrations of 1 to `max_steps` steps for a warm start, too few to teach more than the rules and some of how to get
there; RL finds the rest. Of the demonstrations the share `demo_correct` ends at the target, and the others go anywhere.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recipe.common.tasks.problem_files import (
    conversation,
    draw_until,
    parser_of,
    require,
    rl_row,
    split_of,
    write_and_tell,
)
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from verl.evaluation.questions import walk_text
from verl.utils.data_files import write_rows
from verl.utils.reward_score.walk import BrokenRule, apply, follow
from verl.workers.rollout.trees.hato.local_reward import Step

# in the order of writing: train.parquet says that all are there
SIZES = {"valid": "valid_size", "test": "test_size", "sft": "demo_size", "train": "train_size"}
HELD_OUT = {"valid": 0.1, "test": 0.1}  # shares of all problems
FRUITLESS_ATTEMPTS = 20_000
SHORT = re.compile(r"(\d+)>(\d+) (\d+):((?: [-+*/]\d+)+)")  # a prompt in style "short"
# 1.3 million parameters; every number of a walk is one token
MODEL = TinyModelConfig(
    hidden_size=160,
    intermediate_size=640,
    num_layers=3,
    num_heads=5,
    num_kv_heads=5,
    extra_words=tuple(map(str, range(10, 100))),
)


@dataclass(frozen=True, kw_only=True)
class WalkConfig:
    """Difficulty and size. The defaults are what a model of a million parameters learns in minutes.

    Attributes:
        operators: an operation for each sign, in this order: `+*-` may become `+5 *2 -3`.
        max_operand, max_factor: of + and -, of * and /.
        limit: a walk's numbers are whole and lie between 0 and this.
        max_share: at most this share of the possible sequences of operations ends at the target.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    train_size: int = 800
    valid_size: int = 96
    test_size: int = 96
    demo_size: int = 16_000
    demo_correct: float = 0.6
    min_steps: int = 4
    max_steps: int = 6
    max_start: int = 20
    operators: str = "+*-"
    max_operand: int = 1
    max_factor: int = 2
    limit: int = 40
    max_share: float = 0.1
    style: str = "short"
    seed: int = 0

    def __post_init__(self):
        for name in SIZES.values():
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        require(0 <= self.demo_correct <= 1, "demo_correct", self.demo_correct, "between 0 and 1")
        require(1 <= self.min_steps, "min_steps", self.min_steps, "at least 1")
        require(self.min_steps <= self.max_steps <= 12, "max_steps", self.max_steps, "min_steps to 12")
        require(2 <= self.max_factor, "max_factor", self.max_factor, "at least 2")
        require(1 <= self.max_operand, "max_operand", self.max_operand, "at least 1")
        require(1 <= self.max_start <= self.limit, "max_start", self.max_start, "1 to limit")
        require(0 < self.max_share <= 1, "max_share", self.max_share, "above 0, at most 1")
        known = len(self.operators) > 1 and set(self.operators) <= set("+-*/")
        require(known, "operators", self.operators, "at least two of + - * /")
        require(self.style in ("short", "long"), "style", self.style, "short or long")


class Problem(NamedTuple):
    """From `start` to `target` in `steps` steps, each by one of `operations`; no number leaves 0 to `limit`."""

    start: int
    target: int
    steps: int
    operations: tuple[str, ...]
    limit: int

    def truth(self) -> dict:
        """What `reward_score.walk.compute_score` takes."""
        return self._asdict() | {"operations": list(self.operations)}


def ends(problem: Problem) -> Counter[int]:
    """Number -> how many sequences of operations end there; the target does not count."""
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
    """A walk in writing, each of the possible ones (`right`: of those that end at the target) with equal chance."""
    known: dict[tuple[int, int], int] = {}

    def completions(value: int, steps: int) -> int:
        """In how many ways a walk can go on from `value`."""
        if steps == 0:
            return int(not right or value == problem.target)
        if (value, steps) not in known:
            known[value, steps] = sum(completions(result, steps - 1) for _, result in moves(value))
        return known[value, steps]

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


def written(walk: str, style: str) -> str:
    """A walk as a demonstration answers: alone (`short`), or between tags as the long prompt asks."""
    return walk if style == "short" else f"<answer>\n{walk}\n</answer>"


def can_still_arrive(problem: Problem, written: str) -> bool:
    """Whether the lines keep the rules and the walk can go on to its target, or is there after its last step."""
    n_lines = sum(bool(line) for line in written.splitlines())
    try:
        _, value = follow(written, problem.truth() | {"steps": n_lines})
    except BrokenRule:
        return False
    left = problem._replace(start=value, steps=problem.steps - n_lines)
    return left.steps >= 0 and ends(left)[left.target] > 0


def can_arrive(step: Step) -> float:
    """Whether a walk (short prompts) keeps the rules so far and can still end at its target: 1 or 0.

    The best that a process reward model could say, for `hato.local_reward=recipe.common.tasks.walk.can_arrive`.
    """
    assert step.decode is not None
    question = SHORT.search(step.decode(step.problem))
    if question is None:
        raise ValueError(
            "hato.local_reward=recipe.common.tasks.walk.can_arrive: expected a number walk with a short prompt"
        )
    start, target, steps, operations = question.groups()
    problem = Problem(int(start), int(target), int(steps), tuple(operations.split()), WalkConfig.limit)
    written = step.decode([*step.before, *step.tokens]).partition("<|")[0]  # the special token at the end
    return float(can_still_arrive(problem, written))


def random_problem(config: WalkConfig, steps: int, max_share: float, rng: random.Random) -> Problem | None:
    """A problem whose target at most this share of the sequences reaches; None where there is no such target."""
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
    """`size` distinct problems of a split with `min_steps` to `max_steps` steps, all numbers of steps in turn.

    Raises:
        ValueError: the config has too few such problems.
    """
    numbers_of_steps = config.max_steps - config.min_steps + 1
    return draw_until(
        lambda drawn: random_problem(config, config.min_steps + drawn % numbers_of_steps, config.max_share, rng),
        lambda problem: split_of(problem, HELD_OUT) == split,
        size,
        SIZES[split],
        FRUITLESS_ATTEMPTS,
    )


def demonstration(config: WalkConfig, rng: random.Random) -> dict:
    """A conversation in the SFT trainer's format, about a problem of 1 to `max_steps` steps that is not held out."""
    steps, problem = rng.randint(1, config.max_steps), None
    while problem is None or (steps >= config.min_steps and split_of(problem, HELD_OUT) != "train"):
        problem = random_problem(config, steps, 1.0, rng)
    right = rng.random() < config.demo_correct
    question = walk_text(problem.truth(), config.style)
    return conversation(question, written(random_walk(problem, right, rng), config.style))


def write_walks(output_dir: str | Path, config: WalkConfig | None = None) -> dict[str, Path]:
    """Write the four files, each complete or not at all; returns their paths by split."""
    config = config or WalkConfig()
    paths = {}
    for split, name in SIZES.items():
        rng, size = random.Random(f"{config.seed} {split}"), getattr(config, name)
        if split == "sft":
            rows = [demonstration(config, rng) for _ in range(size)]
        else:
            problems = draw_problems(config, split, size, rng)
            rows = [
                rl_row("walk", walk_text(problem.truth(), config.style), problem.truth(), split, i)
                for i, problem in enumerate(problems)
            ]
        if rows:
            paths[split] = Path(output_dir) / f"{split}.parquet"
            write_rows(paths[split], rows)
    return paths


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, WalkConfig, output_required=False)
    parser.add_argument("--model-dir", help="where the tiny model goes that reads a number as one token")
    options = vars(parser.parse_args(arguments))
    output_dir, model_dir = options.pop("output_dir"), options.pop("model_dir")
    if not output_dir and not model_dir:
        parser.error("--output-dir or --model-dir says what to make")
    if model_dir:
        print(f"tiny model: {write_tiny_model(model_dir, MODEL)}")
    if output_dir:
        write_and_tell(write_walks, WalkConfig, options, output_dir, SIZES)


if __name__ == "__main__":
    main()
