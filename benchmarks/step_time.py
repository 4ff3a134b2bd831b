"""Compares whole training steps with `update=rows` and `update=tree`, phase by phase, as the recipes run on CPU.

    python -m benchmarks.step_time [--steps 10] [--methods grpo latr hato arpo]

For each method the recipe's own script runs twice, one after the other, from the same weights and seed; it makes
missing data and a missing warm start. The first step is left out, because it contains first calls. Both runs see the
same prompts, so that rewards, losses and gradient norms can also be compared step by step, as long as no sampled token
differs. Finished runs in outputs/step_time are used. Writes benchmarks/results/step_time.md.
"""

import os
import subprocess
from pathlib import Path

import pandas as pd

from benchmarks.report import parser_of, with_range, write_report
from recipe.common.reporting.run_metrics import METRICS_FILE, load_metrics

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "outputs" / "step_time"
SCRIPTS = {
    "grpo": "recipe/common/run_explore.sh",
    "latr": "recipe/latr/run_countdown_cpu.sh",
    "hato": "recipe/hato/run_countdown_cpu.sh",
    "arpo": "recipe/arpo/run_search_task_cpu.sh",
}
UPDATES = ("rows", "tree")
PHASES = ("gen", "old_log_prob", "ref", "adv", "update_actor", "step")
SHARES = "perf/unique_token_share", "perf/trained_token_share"
COMPARED = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm")


def run(method: str, update: str, steps: int) -> pd.DataFrame:
    """Return the metrics of a run, one row per step. An earlier benchmark's run is used if it has as many steps."""
    name = f"{method}_{update}"
    if (FOLDER / name / METRICS_FILE).exists():
        metrics = load_metrics(FOLDER / name)
        if len(metrics) == steps and (update == "rows" or {*SHARES} <= {*metrics}):
            return metrics
    never = ["trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false", "trainer.tree_freq=-1"]
    command = ["bash", SCRIPTS[method], f"update={update}", f"trainer.total_training_steps={steps}", *never]
    env = {**os.environ, "HARDWARE": "cpu", "METHOD": method, "EXPERIMENT_NAME": name, "RUN_DIR": str(FOLDER / name)}
    subprocess.run(command, check=True, cwd=ROOT, env=env)
    return load_metrics(FOLDER / name)


def same_steps(rows: pd.DataFrame, tree: pd.DataFrame) -> str:
    """Return how many steps pass until the mean rewards differ, and these steps' largest differences, as text.

    The differences are those of the loss and of the gradient norm, such as `9 of 10: 1e-07, 2e-06`.
    """
    equal = ((rows[COMPARED[0]] - tree[COMPARED[0]]).abs() < 1e-6).cummin()  # rewards are means in float32
    differences = [(rows[name] - tree[name])[equal].abs().max() for name in COMPARED[1:]]
    return f"{equal.sum()} of {len(equal)}: {differences[0]:.0e}, {differences[1]:.0e}" if equal.any() else "0"


def main() -> None:
    parser = parser_of(__doc__, steps=10)
    parser.add_argument("--methods", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    args = parser.parse_args()
    table = []
    for method in args.methods:
        runs = {update: run(method, update, args.steps) for update in UPDATES}
        rows, tree = runs.values()
        for phase in PHASES:
            if (column := f"timing_s/{phase}") not in rows:
                continue
            seconds = [runs[update][column].iloc[1:].tolist() for update in UPDATES]
            ratio = rows[column].iloc[1:].median() / tree[column].iloc[1:].median()
            table.append([method, phase, *(with_range(values, ".2f") for values in seconds), f"{ratio:.2f}", "", ""])
        table[-1][-2:] = f"{tree[[*SHARES]].prod(axis=1, skipna=False).mean():.2f}", same_steps(rows, tree)
        print(*table[-1], sep=" | ", flush=True)
    what = (
        f"Seconds a step, median of steps 2 to {args.steps} (least to most), and the ratio of the medians. Unique "
        "tokens: those that the update computes, as a share of all rows' tokens; rows without advantages are left out. "
        "Same steps: how many steps from the first have the same mean reward in both runs, and the largest difference "
        "of loss and of gradient norm in these."
    )
    header = ["recipe", "phase", "rows", "tree", "rows / tree", "unique tokens", "same steps: loss, norm"]
    write_report("step_time", what, header, table)


if __name__ == "__main__":
    main()
