"""Evaluates the number walk on this project's data."""

import json

from recipe.tasks.walk.reward import compute_score, walk_of
from verl.evaluation.questions.benchmarks import register_benchmark
from verl.evaluation.scores.scoring import by_reward, register_scoring
from verl.utils.data_files import BadRow


def walk_truth(truth) -> list[str]:
    """Return the ground truth that `walk.reward` takes, as JSON."""
    try:
        return [json.dumps(walk_of(truth))]
    except ValueError as error:
        raise BadRow(str(error)) from error


register_scoring("walk", "exact arithmetic, line by line", by_reward(compute_score))
register_benchmark(
    "walk",
    "the number walk",
    "python -m recipe.tasks.walk.data --output-dir outputs/data/walk, and evaluate with scripts/eval-walk.sh",
    scoring="walk",
    read_truth=walk_truth,
)
