"""Evaluates players of text games: the score is the game's reward."""

from recipe.tasks.textworld.reward import walkthrough_of
from verl.evaluation.questions.benchmarks import register_benchmark
from verl.evaluation.scores.scoring import ENVIRONMENT

register_benchmark(
    "textworld",
    "text games of TextWorld",
    "python -m recipe.tasks.textworld.data --output-dir outputs/data/textworld, and evaluate with "
    "scripts/eval-textworld.sh",
    scoring=ENVIRONMENT,
    read_truth=walkthrough_of,
)
