"""What schedules gain where tools are slow: a model, and runs of the real stack.

    python -m benchmarks.schedules [--simulated-steps 300]
    python scripts/fork_server.py python -m benchmarks.schedules --steps 10

The model is benchmarks/schedule_model.py. With `--steps` there are also runs of so many steps: ARPO on the search task
with made, log-normal latencies of the search (benchmarks/slow_search.py), one for each schedule, with the same bounds
of staleness; the first two steps do not count. A run that exists is not repeated. Baseline: schedule=sync. Writes
benchmarks/results/schedules.md and .png.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.learning_curves import trained
from benchmarks.report import RESULTS, parser_of, table_lines, write_report
from benchmarks.schedule_model import Workload, simulate
from benchmarks.slow_search import SLOW_SEARCH
from recipe.common.run_metrics import load_metrics

SCHEDULES = ("sync", "colocate_async", "separate_async")
MODEL = Workload()
SIGMAS = (0.0, 0.5, 1.0, 1.5)
SKIPPED_STEPS = 2
LATENCY = {"median": 1.0, "sigma": 1.2}
TOOLS = "actor_rollout_ref.rollout.tools"
COMMAND = ["recipe/arpo/run_search_task_cpu.sh", "trainer.test_freq=-1", "trainer.val_before_train=false"]
COMMAND += [f"{TOOLS}.timeout=1000", f"{TOOLS}.max_workers=1024", SLOW_SEARCH]
COMMAND += [f"+{TOOLS}.tool_instances.search.params.{name}={value}" for name, value in LATENCY.items()]
OFF_POLICY = "training/off_policy/trajectory_"


def model_rows(steps: int) -> list[list[str]]:
    """Of each tail and schedule: seconds of a step, times faster than sync, and the staleness of a group."""
    rows = []
    for sigma in SIGMAS:
        workload = replace(MODEL, sigma=sigma)
        sync = simulate(workload, "sync", steps=steps)
        for schedule in SCHEDULES:
            for ahead in (1,) if schedule == "sync" else (1, 2, 4):
                result = simulate(workload, schedule, ahead, steps=steps)
                ahead_text = "" if schedule == "sync" else str(ahead)
                gain = sync.seconds / result.seconds
                row = [f"{sigma:g}", schedule, ahead_text, f"{result.seconds:.1f}", f"{gain:.2f}"]
                rows.append([*row, f"{result.staleness:.2f}"])
    return rows


def measured(schedule: str, steps: int) -> pd.DataFrame:
    """Metrics of a run's steps that count."""
    folder = trained(f"schedules_{schedule}_{steps}steps", "arpo", 0, steps, [*COMMAND, f"schedule={schedule}"])
    return load_metrics(folder).loc[1 + SKIPPED_STEPS : steps]


def measured_row(schedule: str, metrics: pd.DataFrame, sync: float) -> list[str]:
    rate = tokens_per_second(metrics)
    row = [schedule, f"{metrics['timing_s/step'].mean():.1f}", f"{metrics['timing_s/gen'].mean():.1f}"]
    row += [f"{rate:.0f}", f"{rate / sync:.2f}"]
    row += [f"{metrics[f'{OFF_POLICY}staleness/mean'].mean():.2f}", f"{metrics[f'{OFF_POLICY}spans/mean'].mean():.2f}"]
    return [*row, f"{metrics[f'{OFF_POLICY}staleness_worst/max'].max():.0f}"]


def tokens_per_second(metrics: pd.DataFrame) -> float:
    """Trained tokens of responses."""
    tokens = metrics["response_length/mean"] * metrics["tree/prompts"] * 8
    return tokens.sum() / metrics["timing_s/step"].sum()


def draw(rows: Sequence[Sequence[str]], runs: dict[str, pd.DataFrame]) -> None:
    figure = Figure(figsize=(9 if runs else 5.5, 3.6), layout="constrained")
    left, *others = figure.subplots(1, 2 if runs else 1, squeeze=False)[0]
    for schedule in SCHEDULES[1:]:
        for ahead in ("1", "4"):
            points = [(float(row[0]), float(row[4])) for row in rows if row[1:3] == [schedule, ahead]]
            left.plot(*zip(*points, strict=True), marker="o", label=f"{schedule}, {ahead} ahead")
    left.set(xlabel="sigma of a call's log-normal seconds", ylabel="times faster than sync", title="model")
    left.axhline(1, color="gray", linewidth=0.8)
    left.legend(frameon=False, fontsize=8)
    for right in others:
        waits = [metrics["timing_s/gen"].mean() for metrics in runs.values()]
        rest = [metrics["timing_s/step"].mean() - wait for metrics, wait in zip(runs.values(), waits, strict=True)]
        right.bar(list(runs), waits, color="C1", label="waiting for responses")
        right.bar(list(runs), rest, bottom=waits, color="C0", label="update and the rest")
        right.set(ylabel="seconds of a step", title="runs with made latencies")
        right.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "schedules.png", dpi=150)


def measurement(steps: int, runs: dict[str, pd.DataFrame]) -> list[str]:
    """The page's lines."""
    sync = tokens_per_second(runs["sync"])
    header = ["schedule", "s a step", "of these s of waiting", "trained tokens/s", "times sync", "staleness", "spans"]
    rows = [measured_row(name, metrics, sync) for name, metrics in runs.items()]
    what = (
        f"ARPO on the search task, 16 prompts x 8 trajectories, {steps - SKIPPED_STEPS} steps each; a search takes "
        f"log-normal seconds (median {LATENCY['median']:g}, sigma {LATENCY['sigma']:g}). `separate_async` has a second "
        "server for the rollout, on the same two cores. Staleness, spans: steps and policies, means over responses."
    )
    return ["## Runs", "", what, "", *table_lines([*header, "oldest token"], rows), ""]


def main() -> None:
    args = parser_of(__doc__, steps=0, simulated_steps=300).parse_args()
    sys.argv[:1] = ["-m", "benchmarks.schedules"]
    runs = {schedule: measured(schedule, args.steps) for schedule in SCHEDULES} if args.steps else {}
    model = model_rows(args.simulated_steps)
    draw(model, runs)
    of_runs = measurement(args.steps, runs) if runs else []
    about = (
        f"A step trains {MODEL.batch} groups of {MODEL.trajectories} trajectories; a trajectory makes {MODEL.calls} "
        f"calls one after another and writes for {MODEL.writing:g} s before, between and after them. A call takes "
        f"log-normal seconds of median {MODEL.median:g}, at most {MODEL.longest:g}; an update takes {MODEL.update:g} s "
        "on all GPUs, twice as long on the half of them that `separate_async` has for it. Groups do not slow each "
        f"other down, as on servers that are not full. Means over {args.simulated_steps} steps. Staleness: steps from "
        "a group's start to its update. No measurement: a model."
    )
    what = "\n".join(["![Gain by tail and batches ahead](schedules.png)", "", *of_runs, "## Model", "", about])
    write_report(
        "schedules", what, ["sigma", "schedule", "batches ahead", "s a step", "times sync", "staleness"], model
    )


if __name__ == "__main__":
    main()
