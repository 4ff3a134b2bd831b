"""Compares credits on trees by their learning speed: a tabular policy, K decisions, one right action each.

    python -m studies.credit_simulation [--seeds 3]

A prompt's policy has a softmax for each decision; an answer is right when all of its decisions are. One verdict in ten
is wrong, as otherwise the largest steps would always be best. Each way draws equally many decisions:

    trajectories   8 of K decisions
    random forks   2 trajectories, then forks of them at random places, continued to the end, as in ARPO and TreeRL
    levels         HATO's search without a value model: 2, 6 and 16 ends after each third of the K decisions

The estimators are the project's own; each uses the best of several learning rates. The baseline is GRPO on independent
trajectories. Writes studies/results/credit_simulation.md; needs no engine and one process.
"""

from functools import partial
from statistics import fmean

import numpy as np
import torch

from benchmarks.report import parser_of, write_report
from studies import RESULTS
from studies import tabular_trees as trees
from studies.tabular_learning import Method, learn
from studies.tabular_trees import ACTIONS, N
from studies.where_trees_pay import FLAT, Condition, first_logits

PROMPTS, STEPS, FIRST_ACCURACY, FLIPPED = 16, 40, 0.1, 0.1
LENGTHS = (3, 6, 12)
RATES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
CREDITS = (
    "grpo_vectorized",
    "arpo_hard",
    "tree_path",
    "tree_gain",
    "treerl",
    "tree_grpo",
    "hato",
    "hato, R the mean outcome",
)
METHODS = (
    Method("trajectories", trees.independent, ("grpo_vectorized",)),
    Method("random forks", trees.random_forks, CREDITS),
    Method("levels", partial(trees.levels, ends=trees.spread), CREDITS),
)


def accuracies_of(length: int, method: Method, credit: str, rates: tuple[float, ...], seeds: int) -> dict:
    """Return rate -> for each seed, the chance of a right answer after STEPS updates, as the prompts' mean."""
    condition = Condition(length, FIRST_ACCURACY, FLAT)
    first = np.tile(first_logits(condition, PROMPTS, 0), (len(rates) * seeds, 1, 1, 1, 1))
    curves = learn(condition.task, method, credit, np.repeat(rates, seeds), first, 0, STEPS, FLIPPED)
    return dict(zip(rates, curves.accuracy[-1].reshape(len(rates), seeds).tolist(), strict=True))


def main() -> None:
    parser = parser_of(__doc__, seeds=3)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table, baseline = [], {}
    for method, credit in [(m, credit) for m in METHODS for credit in m.credits]:
        row = [method.name, credit]
        for length in LENGTHS:
            by_rate = accuracies_of(length, method, credit, tuple(args.rates), args.seeds)
            rate, accuracies = max(by_rate.items(), key=lambda item: fmean(item[1]))
            mean = fmean(accuracies)
            ratio = mean / baseline.setdefault(length, mean)
            spread = f"{min(accuracies):.2f} to {max(accuracies):.2f}"
            row.append(f"{mean:.2f} ({spread}), {ratio:.2f} x, rate {rate:g}")
        table.append(row)
        print(*row, sep=" | ", flush=True)
    what = (
        f"Chance of a right answer after {STEPS} steps, mean of {args.seeds} seeds (least to most), against GRPO on "
        f"trajectories, and the best learning rate of {', '.join(f'{rate:g}' for rate in args.rates)}. {PROMPTS} "
        f"prompts, {ACTIONS} actions a decision, {N} x K decisions drawn for a prompt and step, {FIRST_ACCURACY} right "
        f"at first, {FLIPPED} of the verdicts wrong. `hato` has the default weights and no R_local; random forks are "
        f"ARPO's and TreeRL's, levels HATO's ({', '.join(map(str, trees.spread(3)))} ends)."
    )
    write_report(
        "credit_simulation", what, ["grown", "credit", *(f"K = {length}" for length in LENGTHS)], table, RESULTS
    )


if __name__ == "__main__":
    main()
