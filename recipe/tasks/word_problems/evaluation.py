"""Evaluates word problems: the last number of a response is its answer."""

from recipe.tasks.word_problems.reward import compute_score
from verl.evaluation.questions.benchmarks import register_benchmark
from verl.evaluation.scores.scoring import by_reward, register_scoring

register_scoring("number", "the last number of the last \\boxed, or of the response, exactly", by_reward(compute_score))
register_benchmark(
    "wordproblems",
    "the synthetic word problems",
    "python -m recipe.tasks.word_problems.data --output-dir outputs/data/word_problems, and evaluate with "
    "scripts/eval-wordproblems.sh",
    scoring="number",
)
