"""Evaluates agents on the made search task: exact match with the answer between tags."""

from verl.evaluation.questions.benchmarks import register_benchmark

register_benchmark(
    "searchtask",
    "the synthetic search task",
    "python -m recipe.tasks.search.data --output-dir outputs/data/search_task, and evaluate with "
    "scripts/eval-searchtask.sh",
    scoring="qa",
    style="answer",
)
