"""Measures held-out accuracy before and after RL for each method and seed, to see whether a method learns.

    python -m studies.learning_curves [--runs grpo=0,1,2 dapo=0,1,2] [--steps 120] [--name learning_curves]
        [--overrides actor_rollout_ref.actor.ppo_mini_batch_size=8]

Runs a method's script once per seed from the same warm start, and reads mean@n from the trainer's validation. The
baselines are the warm start, measured in the same run at step 0, and the last method of --runs. Writes
studies/results/<name>.md and .png. A run that exists is not repeated.
"""

import os
import subprocess
from pathlib import Path

import pandas as pd

from benchmarks.report import parser_of, write_report
from recipe.common.reporting.run_metrics import load_metrics, plot_runs, validation_accuracy
from studies import RESULTS

ROOT = Path(__file__).resolve().parent.parent
HATO, N14 = "recipe/hato/run_countdown_cpu.sh", "actor_rollout_ref.rollout.n=14"
SCRIPTS = {
    "grpo": ["recipe/common/run_grpo_countdown.sh"],
    "dapo": ["recipe/common/run_dapo_countdown.sh"],
    "hapo": ["recipe/hapo/run_countdown_cpu.sh"],
    "grpo-kt": ["recipe/latr/run_countdown_cpu.sh"],
    "grpo-kt-paper": [
        "recipe/latr/run_countdown_cpu.sh",
        "actor_rollout_ref.rollout.kt.prob_filter_abs_thres=0.25",
        "actor_rollout_ref.rollout.kt.prob_filter_rel_thres=0.15",
    ],
    # the script and settings of grpo-kt, with ordinary sampling
    "grpo-vllm": ["recipe/latr/run_countdown_cpu.sh", "actor_rollout_ref.rollout.name=vllm"],
    # A tree with 14 leaves, some of them drawn twice, costs about as many generated tokens as 8 responses.
    "hato": [HATO, N14],
    # one part of the reward alone
    "hato-local": [HATO, N14, "hato.reward_weights={alpha:1.0,beta:0.0,gamma:0.0}"],
    "hato-path": [HATO, N14, "hato.reward_weights={alpha:0.0,beta:1.0,gamma:0.0}"],
    "hato-causal": [HATO, N14, "hato.reward_weights={alpha:0.0,beta:0.0,gamma:1.0}"],
    # the synthetic task of searching and computing
    "arpo": ["recipe/arpo/run_search_task_cpu.sh"],
    "aepo": ["recipe/arpo/run_search_task_cpu.sh"],
    "grpo-tools": ["recipe/arpo/run_search_task_cpu.sh"],
}
# columns with the mean of the last ten steps, for metrics that the run has
AT_THE_END = {
    "entropy": "actor/entropy",
    "response tokens": "response_length/mean",
    "distinct answers": "diversity/distinct_answers",
    "edit distance": "diversity/edit_distance",
    "tool calls a prompt": "tree/tool_calls",
    "tool calls a trajectory": "tree/tool_calls_per_trajectory",
    "generated tokens a prompt": "tree/tokens_generated",
    "distinct trajectories": "tree/distinct_trajectories",
    "shared tokens": "tree/shared_tokens",
}


def trained(
    experiment: str, method: str, seed: int, steps: int, command: list[str], output=None, **environment: str
) -> Path:
    """Return the folder of a training run. The run is started if it is not complete.

    Args:
        method: name of the method; its part before the first hyphen, such as `hato` of `hato-path`, is given to the
            script as METHOD.
        command: a run script, and overrides.
        output: a file for the script's output.
        environment: further environment variables for the script.
    """
    folder = ROOT / "outputs" / experiment
    if not (folder / f"global_step_{steps}" / "COMPLETE").exists():
        env = {"METHOD": method.split("-")[0], "HARDWARE": "cpu", "SEED": str(seed), "EXPERIMENT_NAME": experiment}
        script, *overrides = command
        length = [f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}"]
        options = {"cwd": ROOT, "env": {**os.environ, **env, **environment}, "stdout": output, "stderr": output}
        subprocess.run(["bash", script, *length, *overrides], check=True, **options)
    return folder


def row_of(metrics: pd.DataFrame) -> dict[str, float]:
    """Return one run's numbers for the table, by column."""
    (accuracy,) = validation_accuracy(metrics).values()
    row = {"warm start": accuracy.iloc[0], "after RL": accuracy.iloc[-1], "gain": accuracy.iloc[-1] - accuracy.iloc[0]}
    row |= {label: metrics[key].dropna().tail(10).mean() for label, key in AT_THE_END.items() if key in metrics}
    validation = metrics["timing_s/testing"].sum() if "timing_s/testing" in metrics else 0.0
    return row | {"minutes": (metrics["timing_s/step"].sum() + validation) / 60}


def steps_to_reach(metrics: pd.DataFrame, accuracy: float) -> str:
    """Return the step of the first validation at or above an accuracy, or `not reached`."""
    (measured,) = validation_accuracy(metrics).values()
    reached = measured.index[measured >= accuracy]
    return str(reached[0]) if len(reached) else "not reached"


def table_of(runs: dict[tuple[str, int], pd.DataFrame], baseline: str) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return header and rows: each method's seeds, then their mean. `runs` maps (method, seed) to metrics."""
    index = pd.MultiIndex.from_tuples(runs)
    measured = pd.DataFrame([row_of(metrics) for metrics in runs.values()], index)
    rows = []
    for method, own in measured.groupby(level=0, sort=False):
        for (_, seed), row in own.iterrows():
            target = measured["after RL"].get((baseline, seed))
            reached = "" if target is None else steps_to_reach(runs[method, seed], target)
            rows.append((method, str(seed), *cells_of(row), reached))
        if len(own) > 1:
            rows.append((method, f"mean of {len(own)}", *cells_of(own.mean(skipna=False)), ""))
    return ["method", "seed", *measured, f"steps to {baseline}'s final accuracy"], rows


def cells_of(row: pd.Series) -> list[str]:
    """Return the numbers as text with three digits; a missing number is empty."""
    return ["" if pd.isna(value) else f"{value:.3f}" for value in row]


def main() -> None:
    parser = parser_of(__doc__, steps=120, test_freq=40, name="learning_curves")
    parser.add_argument("--runs", nargs="+", default=["grpo=0,1,2", "dapo=0,1,2"], metavar="METHOD=SEEDS")
    parser.add_argument("--overrides", nargs="*", default=[])
    args = parser.parse_args()
    runs = {}
    for method, seeds in (named.split("=") for named in args.runs):
        for seed in map(int, seeds.split(",")):
            command = [*SCRIPTS[method], f"trainer.test_freq={args.test_freq}", *args.overrides]
            folder = trained(f"{args.name}_{method}_seed{seed}", method, seed, args.steps, command)
            runs[method, seed] = load_metrics(folder)
    labeled = {f"{method} seed {seed}": metrics for (method, seed), metrics in runs.items()}
    plot_runs(labeled, RESULTS / f"{args.name}.png")
    changed = f" Overrides: `{' '.join(args.overrides)}`." if args.overrides else ""
    for method in dict.fromkeys(method for method, _ in runs):
        if own := SCRIPTS[method][1:]:
            changed += f" {method}: `{' '.join(own)}`."
    write_report(
        args.name,
        f"{args.steps} steps of the script's batch, 16 prompts x 8 unless the overrides say otherwise; accuracy is the "
        "trainer's mean over samples on 64 held-out problems at temperature 1. Minutes are steps and validation, "
        f"without start-up.{changed}",
        *table_of(runs, baseline=args.runs[-1].split("=")[0]),
        RESULTS,
    )


if __name__ == "__main__":
    main()
