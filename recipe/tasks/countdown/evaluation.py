"""Evaluates Countdown on this project's data and on the public set, which has numbers only."""

import json

from recipe.tasks.countdown.data import countdown_text
from recipe.tasks.countdown.reward import compute_score
from verl.evaluation.questions.benchmarks import HUB, register_benchmark, truth_row
from verl.evaluation.scores.scoring import by_reward, register_scoring
from verl.utils.data_files import BadRow


def countdown_question(row: dict, names: tuple[str, ...]) -> str:
    """Return the question in this project's words, with full instructions."""
    problem = json.loads(countdown_answers(row, names)[0])
    return countdown_text(problem["numbers"], problem["target"], "+-*/", "long")


def countdown_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the ground truth that `countdown.reward` takes, as JSON.

    >>> countdown_answers({"nums": [3, 4], "target": 7}, ())
    ['{"target": 7, "numbers": [3, 4]}']
    """
    numbers, target = row.get("nums") or row.get("numbers"), row.get("target")
    if not isinstance(numbers, list) or not all(type(number) is int for number in [*numbers, target]):
        raise BadRow("no whole numbers in nums (or numbers) and target")
    return [json.dumps({"target": target, "numbers": numbers})]


register_scoring("countdown", "exact arithmetic", by_reward(compute_score))
register_benchmark(
    "countdown",
    "Countdown",
    f"python -m recipe.tasks.countdown.data, or {HUB}/Jiayi-Pan/Countdown-Tasks-3to4",
    question=("nums", "numbers"),
    answer=("target",),
    scoring="countdown",
    read_question=countdown_question,
    read_answers=countdown_answers,
    read_truth=lambda truth: countdown_answers(truth_row(truth), ()),
)
