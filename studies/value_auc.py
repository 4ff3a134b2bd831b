"""Measures how well HATO's value model predicts, in trees that runs have written, if a right answer follows a step.

    python -m studies.value_auc outputs/method_runs_hato_100steps_seed0 outputs/method_runs_hato_100steps_seed1

A step's score is V + beta_u U at the time when it was drawn. The AUC is the share of pairs, one step with a right
answer below it and one without, in which the first has the higher score; 0.5 is chance. The steps of a pair have the
same run, training step and depth, and in the second row also the same tree. Steps of the last level are left out, as
they are never dropped. The interval is a bootstrap over trees. Writes studies/results/value_auc.md.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.report import parser_of, write_report
from studies import RESULTS

THRESHOLDS = (0.05, 0.07, 0.09)


class Step(NamedTuple):
    """A tree's step; `tree` is (run, training step, line), and `right` whether an answer below the step is right."""

    tree: tuple[str, int, int]
    depth: int
    score: float
    right: bool


def steps_of(name: tuple[str, int, int], record: dict, beta_u: float, last_depth: int) -> list[Step]:
    """Return the steps of `record`, a line of a trees file, that lead to an answer and are not on the last level."""
    segments, below, depths = record["segments"], defaultdict(list), {}
    for i, segment in enumerate(segments):
        depths[i] = depths.get(segment["parent"], 0) + ("value" in segment["info"])
    for leaf, reward in zip(record["leaves"], record["rewards"], strict=True):
        at = leaf if reward is not None else None
        while at is not None:
            below[at].append(reward)
            at = segments[at]["parent"]
    infos = ((i, segment["info"]) for i, segment in enumerate(segments))
    return [
        Step(name, depths[i], info["value"] + beta_u * info["uncertainty"], max(below[i]) > 0.5)
        for i, info in infos
        if "value" in info and below[i] and depths[i] < last_depth
    ]


def auc(steps: Sequence[Step], stratum: Callable[[Step], Hashable]) -> tuple[float, int]:
    """Return the AUC over the pairs within each stratum, and the number of pairs; equal scores count half."""
    groups = defaultdict(lambda: ([], []))
    for step in steps:
        groups[stratum(step)][step.right].append(step.score)
    won = pairs = 0.0
    for wrong, right in groups.values():
        difference = np.subtract.outer(right, wrong)
        won += (difference > 0).sum() + (difference == 0).sum() / 2
        pairs += difference.size
    return (won / pairs if pairs else float("nan")), int(pairs)


def with_interval(steps: Sequence[Step], stratum: Callable[[Step], Hashable], draws: int) -> str:
    """Return `auc` with its 95 % interval over trees drawn with replacement; a tree drawn twice counts as two."""
    steps_by_tree = defaultdict(list)
    for step in steps:
        steps_by_tree[step.tree].append(step)
    trees, rng, drawn = list(steps_by_tree.values()), np.random.default_rng(0), []
    for _ in range(draws):
        chosen = enumerate(rng.integers(len(trees), size=len(trees)))
        sample = [step._replace(tree=(*step.tree[:2], copy)) for copy, i in chosen for step in trees[i]]
        drawn.append(auc(sample, stratum)[0])
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return f"{auc(steps, stratum)[0]:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = parser_of(__doc__, beta_u=0.5, depth=4, draws=500)
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    steps = []
    for run in args.runs:
        for file in sorted((run / "trees").glob("step_*.jsonl")):
            for line, text in enumerate(file.read_text().splitlines()):
                steps += steps_of((run.name, int(file.stem[5:]), line), json.loads(text), args.beta_u, args.depth)
    strata = {
        "one training step and depth": lambda step: (*step.tree[:2], step.depth),
        "one tree and depth": lambda step: (step.tree, step.depth),
    }
    rows = [
        [name, str(auc(steps, stratum)[1]), with_interval(steps, stratum, args.draws)]
        for name, stratum in strata.items()
    ]
    times = sorted({step.tree[1] for step in steps})
    for threshold in THRESHOLDS:
        shares = [np.mean([step.score < threshold for step in steps if step.tree[1] == time]) for time in times]
        rows.append([f"share of the steps below {threshold:g}", "", ", ".join(f"{share:.2f}" for share in shares)])
    trees = len({step.tree for step in steps})
    what = (
        f"{len(steps):,} steps of {trees} trees, {sum(s.right for s in steps)} of them with a right answer below. "
        f"The AUC of V + {args.beta_u:g} U with its 95 % interval; the shares are of the training steps "
        f"{', '.join(map(str, times))}."
    )
    write_report("value_auc", what, ["compared within", "pairs", "AUC"], rows, RESULTS)


if __name__ == "__main__":
    main()
