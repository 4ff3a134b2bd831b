"""Compares the speed of schedules where tools are slow, in a model and in runs of the real stack.

    python -m benchmarks.schedules [--simulated-steps 300]
    python scripts/fork_server/fork_server.py python -m benchmarks.schedules --steps 10 --runs 3

The model is studies/schedule_model.py. With `--steps` there are also runs of that length: ARPO on the search task with
made-up, log-normal latencies of the search (benchmarks/slow_search.py). There are `--runs` runs of each schedule, one
after the other, each with its own seed, and with the same bounds of staleness; the first two steps do not count. A run
that exists is not repeated. Baseline: schedule=sync. Writes benchmarks/results/schedules.md and .png.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import RESULTS, in_turns, parser_of, table_lines, with_range, write_report
from benchmarks.slow_search import SLOW_SEARCH
from recipe.common.reporting.run_metrics import load_metrics
from studies.learning_curves import trained
from studies.schedule_model import Workload, simulate
from verl.utils.atomic_files import replacing

SCHEDULES = ("sync", "colocate_async", "separate_async")
MODEL = Workload()
# The workload of the real runs: everything but waiting takes about 1.6 s, on the same cores in every schedule.
LIKE_RUNS = Workload(writing=0.2, sigma=1.2, longest=math.inf, update=1.6)
SIGMAS = (0.0, 0.5, 1.0, 1.5)
SKIPPED_STEPS = 2
LATENCY = {"median": 1.0, "sigma": 1.2}
TOOLS = "actor_rollout_ref.rollout.tools"
COMMAND = ["recipe/arpo/run_search_task_cpu.sh", "trainer.test_freq=-1", "trainer.val_before_train=false"]
COMMAND += [f"{TOOLS}.timeout=1000", f"{TOOLS}.max_workers=1024", SLOW_SEARCH]
COMMAND += [f"+{TOOLS}.tool_instances.search.params.{name}={value}" for name, value in LATENCY.items()]
OFF_POLICY = "training/off_policy/trajectory_"


def model_rows(steps: int) -> list[list[str]]:
    """Return a row for each sigma, schedule and number of batches ahead.

    Its last cells are the seconds of a step, how many times faster than sync, and the mean staleness in steps.
    """
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


def measured(schedule: str, steps: int, seed: int) -> pd.DataFrame:
    """Return the metrics of a run's steps, without the first ones, which do not count."""
    experiment = f"schedules_{schedule}_{steps}steps_seed{seed}"
    folder = trained(experiment, "arpo", seed, steps, [*COMMAND, f"schedule={schedule}"])
    return load_metrics(folder).loc[1 + SKIPPED_STEPS : steps]


def measured_row(schedule: str, runs: Sequence[pd.DataFrame], sync: Sequence[pd.DataFrame]) -> list[str]:
    """Return a schedule's figures: median, least and greatest of its runs. `sync` holds the baseline's runs."""
    rates = [tokens_per_second(metrics) for metrics in runs]
    gains = [rate / tokens_per_second(metrics) for rate, metrics in zip(rates, sync, strict=True)]

    def means(name: str, form: str) -> str:
        return with_range([metrics[name].mean() for metrics in runs], form)

    row = [schedule, with_range([seconds_of(metrics).mean() for metrics in runs], ".1f"), means("timing_s/gen", ".1f")]
    row += [with_range(rates, ".0f"), with_range(gains, ".2f")]
    row += [means(f"{OFF_POLICY}staleness/mean", ".2f"), means(f"{OFF_POLICY}spans/mean", ".2f")]
    return [*row, with_range([metrics[f"{OFF_POLICY}staleness_worst/max"].max() for metrics in runs], ".0f")]


def tokens_per_second(metrics: pd.DataFrame) -> float:
    """Return the tokens of trained responses, tools' results included, per second."""
    tokens = metrics["response_length/mean"] * metrics["tree/prompts"] * 8
    return tokens.sum() / seconds_of(metrics).sum()


def seconds_of(metrics: pd.DataFrame) -> pd.Series:
    """Return the seconds of each step, without the checkpoint of the last one."""
    return metrics["timing_s/step"] - metrics["timing_s/save_checkpoint"].fillna(0)


def draw(rows: Sequence[Sequence[str]], runs: dict[str, list[pd.DataFrame]]) -> None:
    """Draw schedules.png: the gain over sync of `model_rows`, and the seconds of a step in the runs, if any."""
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
        steps = [pd.concat(schedule_runs) for schedule_runs in runs.values()]
        waits = [metrics["timing_s/gen"].mean() for metrics in steps]
        rest = [seconds_of(metrics).mean() - wait for metrics, wait in zip(steps, waits, strict=True)]
        right.bar(list(runs), waits, color="C1", label="waiting for responses")
        right.bar(list(runs), rest, bottom=waits, color="C0", label="update and the rest")
        right.set(ylabel="seconds of a step", title="runs with made latencies")
        right.legend(frameon=False, fontsize=8)
    with replacing(RESULTS / "schedules.png") as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def measurement(steps: int, runs: dict[str, list[pd.DataFrame]]) -> list[str]:
    """Return the page's lines about the runs: the measured figures, and the model's gains for the same workload."""
    header = ["schedule", "s a step", "of these s of waiting", "response tokens/s", "times sync", "staleness", "spans"]
    rows = [measured_row(name, schedule_runs, runs["sync"]) for name, schedule_runs in runs.items()]
    what = (
        f"ARPO on the search task, 16 prompts x 8 trajectories, {steps - SKIPPED_STEPS} steps a run, "
        f"{len(runs['sync'])} run(s) of each schedule, in turn: the median (least to greatest). A search takes "
        f"log-normal seconds (median {LATENCY['median']:g}, sigma {LATENCY['sigma']:g}). `separate_async` has a second "
        "server for the rollout, on the same two cores. Staleness, spans: steps and policies, means over responses."
    )
    gains = " and ".join(
        f"{gain['colocate_async']:.1f} and {gain['separate_async']:.1f} in {length} steps"
        for length in (steps, 300)
        for gain in [gains_of_the_model(LIKE_RUNS, trainer_share=1.0, steps=length)]
    )
    model = (
        f"The model below, with calls of this latency, {LIKE_RUNS.writing:g} s of writing and {LIKE_RUNS.update:g} s "
        f"of update, for which nothing is shared out, says for `colocate_async` and `separate_async` {gains}, of which "
        f"the first {SKIPPED_STEPS} do not count either (times sync)."
    )
    return ["## Runs", "", what, "", *table_lines([*header, "oldest token"], rows), "", model, ""]


def gains_of_the_model(workload: Workload, trainer_share: float, steps: int) -> dict[str, float]:
    """Return asynchronous schedule -> speed relative to sync, with `ahead` = 1 and mean seconds of five seeds."""
    seconds = {
        schedule: fmean(
            simulate(workload, schedule, 1, trainer_share, steps, seed, skip=SKIPPED_STEPS).seconds for seed in range(5)
        )
        for schedule in SCHEDULES
    }
    return {schedule: seconds["sync"] / seconds[schedule] for schedule in SCHEDULES[1:]}


def main() -> None:
    args = parser_of(__doc__, steps=0, runs=3, simulated_steps=300).parse_args()
    sides = {schedule: partial(measured, schedule, args.steps) for schedule in SCHEDULES}
    runs = in_turns(sides, args.runs) if args.steps else {}
    model = model_rows(args.simulated_steps)
    draw(model, runs)
    run_lines = measurement(args.steps, runs) if runs else []
    about = (
        f"A step trains {MODEL.batch} groups of {MODEL.trajectories} trajectories; a trajectory makes {MODEL.calls} "
        f"calls one after another and writes for {MODEL.writing:g} s before, between and after them. A call takes "
        f"log-normal seconds of median {MODEL.median:g}, at most {MODEL.longest:g}; an update takes {MODEL.update:g} s "
        "on all GPUs, twice as long on the half of them that `separate_async` has for it. Groups do not slow each "
        f"other down, as on servers that are not full. Means over {args.simulated_steps} steps. Staleness: steps from "
        "a group's start to its update. No measurement: a model."
    )
    what = "\n".join(["![Gain by tail and batches ahead](schedules.png)", "", *run_lines, "## Model", "", about])
    write_report(
        "schedules", what, ["sigma", "schedule", "batches ahead", "s a step", "times sync", "staleness"], model
    )


if __name__ == "__main__":
    main()
