"""Evaluates the number walk on this project's data, and on rows with the numbers and operations alone."""

import json

from recipe.tasks.walk.data import walk_text
from recipe.tasks.walk.reward import compute_score
from verl.evaluation.questions.benchmarks import Benchmark, register_benchmark, truth_row
from verl.evaluation.scores.scoring import by_reward, register_scoring
from verl.utils.data_files import BadRow


def walk_question(row: dict, names: tuple[str, ...]) -> str:
    """Return the question in this project's words, with full instructions."""
    return walk_text(json.loads(walk_answers(row, names)[0]), "long")


def walk_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the ground truth that `walk.reward` takes, as JSON.

    >>> walk_answers({"start": 3, "target": 8, "steps": 1, "operations": ["+5", "*2"], "limit": 99}, ())
    ['{"start": 3, "target": 8, "steps": 1, "limit": 99, "operations": ["+5", "*2"]}']
    """
    numbers = {name: row.get(name) for name in ("start", "target", "steps", "limit")}
    operations = row.get("operations")
    are_numbers = all(type(number) is int for number in numbers.values())
    if not are_numbers or not isinstance(operations, list) or not all(isinstance(text, str) for text in operations):
        raise BadRow("no whole numbers in start, target, steps and limit, or no texts in operations")
    return [json.dumps(numbers | {"operations": operations})]


register_scoring("walk", "exact arithmetic, line by line", by_reward(compute_score))
register_benchmark(
    "walk",
    Benchmark(
        title="the number walk",
        get="python -m recipe.tasks.walk.data --output-dir outputs/data/walk, and evaluate with scripts/eval-walk.sh",
        question=("start",),
        answer=("target",),
        scoring="walk",
        style="plain",
        read_question=walk_question,
        read_answers=walk_answers,
        read_truth=lambda truth: walk_answers(truth_row(truth), ()),
    ),
)
