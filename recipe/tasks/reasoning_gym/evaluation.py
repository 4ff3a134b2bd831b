"""Evaluates problems of reasoning-gym on this project's data, by the families' verifiers.

    python -m recipe.tasks.reasoning_gym.evaluation SAMPLES

prints a line for each family of an evaluation's samples: right answers in percent with a 95 % interval, and mean score.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq

from recipe.tasks.reasoning_gym.reward import compute_score
from verl.evaluation.questions.benchmarks import register_benchmark
from verl.evaluation.scores.metrics import measure
from verl.evaluation.scores.results import INTERVAL_ENDS
from verl.evaluation.scores.scoring import by_reward, register_scoring

register_scoring("reasoning_gym", "the verifiers of reasoning-gym", by_reward(compute_score))
register_benchmark(
    "reasoninggym",
    "reasoning-gym",
    "python -m recipe.tasks.reasoning_gym.data --output-dir outputs/data/reasoning_gym, and evaluate with "
    "scripts/eval-reasoning-gym.sh",
    scoring="reasoning_gym",
)


def table_by_family(samples: Path) -> list[str]:
    """Return the lines of the table; the row numbers of the evaluation's files are the questions."""
    head, *written = samples.read_bytes().splitlines()  # text would also be split at Unicode's separators in answers
    files = json.loads(head)["settings"]["files"]
    rows = [info for file in files for info in pq.read_table(file, columns=["extra_info"])["extra_info"].to_pylist()]
    by_family = defaultdict(list)
    for line in written:
        sample = json.loads(line)
        by_family[rows[int(sample["question"])]["family"]].append(sample)
    lines = [f"{'family':<28} {'questions':>9} {'Acc-Pass@1':>10}  95 % interval  Acc-Mean"]
    for family, own in sorted(by_family.items()):
        numbers = measure(own, [1])
        low, high = (100 * numbers["Acc-Pass@1" + end] for end in INTERVAL_ENDS)
        n_questions = len({sample["question"] for sample in own})
        accuracy, mean = 100 * numbers["Acc-Pass@1"], numbers["Acc-Mean@1"]
        lines.append(f"{family:<28} {n_questions:>9} {accuracy:>10.1f}  {low:>5.1f} to {high:>5.1f} {mean:>9.3f}")
    return lines


if __name__ == "__main__":
    print("\n".join(table_by_family(Path(sys.argv[1]))))
