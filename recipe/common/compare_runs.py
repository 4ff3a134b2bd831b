"""Compares how fast methods learn a task: at equal steps, at equal generated tokens, in equal time.

    bash recipe/common/run_compare.sh grpo passk "mine: tree=eptree credit=treerl"       (docs/compare.md)

Tokens are those that the server generated, dropped ones included; seconds cover generation, update and all between,
without validation and start-up. A tool call that trajectories share counts once. Differences are to the baseline's run
of the same seed; ± is half of a 95 % interval (Student's t). A run that is in outputs/ is not repeated. `compare.py`
chooses learning rates, and adds seeds until its question is answered.
"""

import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from benchmarks.report import interval, parser_of, write_report
from recipe.common.reporting.run_metrics import (
    STYLE,
    generated_tokens,
    legend_above,
    load_metrics,
    run_colors,
    validation_accuracy,
)
from verl.utils.atomic_files import replacing
from verl.utils.parts import parts

ROOT = Path(__file__).resolve().parents[2]
T, R = TypeVar("T"), TypeVar("R")
AXES = {"steps": "steps", "tokens": "generated tokens", "seconds": "seconds of training", "calls": "tool calls"}
KT = "actor_rollout_ref.rollout.kt"
HATO = ["recipe/hato/run_countdown_cpu.sh", "actor_rollout_ref.rollout.n=16"]
SEARCH = ["recipe/arpo/run_search_task_cpu.sh"]
# script of the small tasks for methods that do not name one
EXPLORE = ["recipe/common/run_explore.sh", "update=tree"]
# the paper's: share of the run -> share of responses that come from trees from then on
LATR_SCHEDULE = {0.0: 1.0, 0.02: 0.75, 0.04: 0.5, 0.16: 0.25, 0.4: 0.0}
# DAPO's dynamic sampling: groups whose answers are all right or all wrong are replaced
FILTERED = [
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_inflight_gen_batches=2",
]
CLIP_HIGHER = ["actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio_c=10.0"]


def schedule_of(shares: dict[int, float]) -> list[str]:
    """Return overrides that replace LATR's schedule: step -> share of responses that come from trees from then on."""
    steps = ", ".join(f"{step}: {share}" for step, share in shares.items())
    return [f"~{KT}.mix_ratio_schedule", f"+{KT}.mix_ratio_schedule={{{steps}}}"]


METHODS = {
    "grpo": ["credit=grpo"],
    "grpo-n4": ["credit=grpo", "actor_rollout_ref.rollout.n=4"],
    "band": ["credit=grpo", "data.sampler.band=0.1:0.9"],
    "dapo": [*FILTERED, *CLIP_HIGHER],
    "grpo-filtered": [*FILTERED],
    "tree_gain": ["tree=plain", "credit=tree_gain"],
    # `command_of` adds the paper's schedule, scaled to the run's length
    "latr": ["recipe/latr/run_countdown_cpu.sh"],
    # Identical steps are merged, so a tree has fewer leaves than n: about half as many tokens as 8 responses.
    "hato": HATO,
    # guided by an exact process reward: whether the target can still be reached
    "hato-dropped": [
        *HATO,
        "hato.local_reward=recipe.tasks.walk.data.can_arrive",
        "hato.exploration.pruning_threshold=0.04",
        "hato.tree.max_depth=6",
        "hato.tree.branching_factor=4",
        "hato.tree.spread_leaves=false",
        "hato.tree.train_dropped=true",
    ],
    "hapo": ["recipe/hapo/run_countdown_cpu.sh"],
    # SmolLM2-135M on word problems; these scripts support no other task
    "grpo-smollm2": ["recipe/common/run_smollm2_cpu.sh"],
    "latr-smollm2": ["recipe/latr/run_smollm2_cpu.sh"],
    "hapo-smollm2": ["recipe/hapo/run_smollm2_cpu.sh"],
    "hato-smollm2": ["recipe/hato/run_smollm2_cpu.sh"],
    "combination-smollm2": ["recipe/common/run_smollm2_combination_cpu.sh"],
    "grpo-tools": SEARCH,
    "arpo": SEARCH,
    "aepo": SEARCH,
    "eptree": ["tree=eptree", "credit=treerl", "actor_rollout_ref.rollout.n=8"]
    + [f"actor_rollout_ref.rollout.custom.eptree.{key}" for key in ("M=2", "N=3", "L=1", "T=1")],
}


def scripts() -> dict[str, list[str]]:
    """Return task -> script and overrides of the methods that do not name a script."""
    tasks = parts("task").values()
    return {task.name: [*task.script] or EXPLORE for task in tasks if task.script or task.is_small}


def overrides_of(method: str, task: str = "walk") -> list[str]:
    """Return a method's overrides, from the first of these places that has any.

    1. the text after `NAME:`
    2. the entry of METHODS with the task's suffix, such as `latr-smollm2` for word problems
    3. the entry NAME of METHODS, if its script trains on this task; a script may be its first element
    4. the registered tree, sampler, credit and loss of this name

    Raises:
        ValueError: there is no method of this name.
    """
    name, colon, overrides = method.partition(":")
    if colon:
        return shlex.split(overrides)
    on = parts("task")[task]
    entry = METHODS.get(f"{name}-{on.suffix}") or METHODS.get(name)
    if entry and (on.is_small or not entry[0].endswith("run_countdown_cpu.sh")):
        return entry
    named = [f"{kind}={name}" for kind in ("tree", "sampler", "credit", "loss") if name in parts(kind)]
    if not named:
        raise ValueError(
            f"there is no method {name}: choose one of {', '.join(METHODS)}; a tree, sampler, credit or loss of "
            'python -m recipe.common.menu; or write "name: hydra overrides"'
        )
    return named


def label_of(method: str) -> str:
    """Return the name of the method `NAME: OVERRIDES` or `NAME`."""
    return method.partition(":")[0]


def command_of(method: str, steps: int, task: str = "walk") -> list[str]:
    """Return a script and overrides: the method's own script, or else the task's."""
    command = overrides_of(method, task)
    if not command[:1] or not command[0].endswith(".sh"):
        command = [*scripts()[task], *command]
    if method != "latr":
        return command
    return [*command, *schedule_of({round(begun * steps): share for begun, share in LATR_SCHEDULE.items()})]


def check(name: str, method: str, task: str, command: Sequence[str]) -> None:
    """Check a method's config, data and model in a dry run, which prints the plan.

    Raises:
        CalledProcessError: the method cannot train.
    """
    print(f"---- {name}", flush=True)
    env = {**os.environ, "DRY_RUN": "1", "HARDWARE": "cpu", "TASK": task, "METHOD": script_method(method)}
    subprocess.run(["bash", *command], check=True, cwd=ROOT, env=env)


def script_method(method: str) -> str:
    """Return METHOD for a run script: for a name of METHODS its part before the first hyphen, else `grpo`."""
    return method.split("-")[0] if method in METHODS else "grpo"


RUNNING: set[subprocess.Popen] = set()


def run_script(command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> None:
    """Run a script of the repository with overrides; raise RuntimeError, which names the log, if it fails."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "HARDWARE": "cpu", **environment}
    with open(log_file, "a") as log:
        options = {"cwd": ROOT, "env": env, "stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(["bash", *command], **options)
        RUNNING.add(process)
        code = process.wait()
        RUNNING.discard(process)
    if code:
        raise RuntimeError(f"{command[0]} failed: {log_file} says why")


def trained(
    experiment: str,
    method: str,
    task: str,
    seed: int,
    command: list[str],
    is_complete: Callable[[pd.DataFrame], bool],
    environment: Mapping[str, str] = {},
) -> pd.DataFrame:
    """Return the curve of a training run, which is started if outputs/ does not have it.

    Args:
        command: a run script, and overrides.
        is_complete: whether a curve reaches the run's end. Runs write no checkpoints: one that does not begins anew.
        environment: further environment variables for the script.

    Raises:
        RuntimeError: the run failed, or ended before its last validation; the message names the log.
    """
    folder = ROOT / "outputs" / experiment
    with suppress(FileNotFoundError, ValueError):
        if is_complete(curve := curve_of(load_metrics(folder))):
            return curve
    env = {"METHOD": script_method(method), "SEED": str(seed), "EXPERIMENT_NAME": experiment, "TASK": task}
    log_file = folder.with_suffix(".log")
    run_script([*command, "trainer.save_freq=-1"], {**env, **environment}, log_file)
    if not is_complete(curve := curve_of(load_metrics(folder))):
        raise RuntimeError(f"{experiment} ended before its last validation: {log_file} says why")
    return curve


def curve_of(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each validation: its accuracy, and the steps, tokens, seconds and calls until then."""
    (accuracy,) = validation_accuracy(metrics).values()
    calls = metrics.get("tree/tool_calls", 0) * metrics["tree/prompts"]
    spent = {"tokens": generated_tokens(metrics), "seconds": metrics["timing_s/step"], "calls": calls}
    sums = {name: values.fillna(0).cumsum()[accuracy.index] for name, values in spent.items()}
    return pd.DataFrame({"accuracy": accuracy, "steps": accuracy.index, **sums})


def check_starts(curves: Mapping[str, Mapping[int, pd.DataFrame]]) -> None:
    """Raise ValueError if runs of a seed begin with different accuracies: another warm start, or another machine."""
    begun: dict[int, tuple[float, str]] = {}
    for name, by_seed in curves.items():
        for seed, curve in by_seed.items():
            first = float(curve["accuracy"].iloc[0])
            before, other = begun.setdefault(seed, (first, name))
            if abs(first - before) > 1e-6:
                raise ValueError(
                    f"with seed {seed}, {other} begins at an accuracy of {before:.4f} and {name} at {first:.4f}: not "
                    "the same warm start or machine, so that they cannot be paired; use another --name"
                )


def axes_of(curves: Mapping[str, Mapping[int, pd.DataFrame]]) -> list[str]:
    """Return the names of AXES (steps, tokens, seconds, calls) whose value is above 0 at the end of every run."""
    ends = [curve.iloc[-1] for by_seed in curves.values() for curve in by_seed.values()]
    return [axis for axis in AXES if all(end[axis] > 0 for end in ends)]


def area(curve: pd.DataFrame, axis: str, end: float) -> float:
    """Return the mean accuracy from 0 to `end` of an axis: on straight lines between validations, flat after the last.

    >>> area(pd.DataFrame({"accuracy": [0.0, 0.4], "tokens": [0, 400]}), "tokens", 200)
    0.1
    """
    inside = curve[curve[axis] < end]
    places = [*inside[axis], end]
    accuracies = [*inside["accuracy"], np.interp(end, curve[axis], curve["accuracy"])]
    return float(np.trapezoid(accuracies, places) / end)


def with_interval(values: Sequence[float], form: str = "+.3f") -> str:
    """Return the mean as text, ± half a 95 % interval where there are two values or more."""
    if len(values) < 2:
        return format(values[0], form)
    mean, half = interval(values)
    return f"{mean:{form}} ± {half:.3f}"


def row_of(
    name: str, curves: Mapping[int, pd.DataFrame], baseline: Mapping[int, pd.DataFrame], axes: Sequence[str]
) -> list[str]:
    """Return the table's row of a method; `curves` and `baseline` map seeds to curves.

    Two cells for each axis hold the difference of accuracy to the baseline's run of the same seed: at the end of the
    shorter of the two runs, and as the mean up to there.
    """
    ends = [curve.iloc[-1] for curve in curves.values()]
    row = [name, str(len(curves)), with_interval([end["accuracy"] for end in ends], ".3f")]
    row += [f"{statistics.mean(end[axis] for end in ends):,.0f}" for axis in axes if axis != "steps"]
    for axis in axes:
        final, mean = [], []
        for seed, curve in curves.items():
            pair = curve, baseline[seed]
            place = min(each[axis].iloc[-1] for each in pair)
            ours, theirs = (np.interp(place, each[axis], each["accuracy"]) for each in pair)
            final.append(float(ours - theirs))
            mean.append(area(pair[0], axis, place) - area(pair[1], axis, place))
        row += [with_interval(final), with_interval(mean)]
    return row


def draw(curves: Mapping[str, Mapping[int, pd.DataFrame]], output: Path) -> None:
    """Draw mean accuracy along each axis of `axes_of`, with a dot for each validation of the first seed, and every
    seed as a thin line."""
    colors, axes = run_colors(list(curves)), axes_of(curves)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5 * len(axes), 4.6), layout="constrained")
        panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
        for ax, axis in zip(panels, axes, strict=True):
            for name, by_seed in curves.items():
                grid = np.linspace(0, min(curve[axis].iloc[-1] for curve in by_seed.values()), 101)
                lines = np.array([np.interp(grid, curve[axis], curve["accuracy"]) for curve in by_seed.values()])
                ax.plot(grid, lines.mean(0), color=colors[name], linewidth=2, label=name)
                dots = next(iter(by_seed.values()))[axis]
                ax.plot(dots, np.interp(dots, grid, lines.mean(0)), "o", color=colors[name], markersize=4)
                if len(lines) > 1:
                    ax.plot(grid, lines.T, color=colors[name], linewidth=0.7, alpha=0.5)
            ax.xaxis.set_major_locator(MaxNLocator(5))
            ax.set(xlabel=AXES[axis])
        panels[0].set(ylabel="accuracy")
        named = [line for line in panels[0].get_lines() if line.get_label() in curves]
        named.append(Line2D([], [], color="#444444", linewidth=2, marker="o", label="mean; dot: validation"))
        if any(len(by_seed) > 1 for by_seed in curves.values()):
            named.append(Line2D([], [], color="#444444", linewidth=0.7, alpha=0.5, label="one seed"))
        legend_above(figure, named, most_columns=6, fontsize=11)
        with replacing(output) as temporary:
            figure.savefig(temporary, format="png", dpi=130)


def in_parallel(tasks: Sequence[T], work: Callable[[T], R], jobs: int, report: Callable[[R], None]) -> None:
    """Call `report(work(task))` for each task, `jobs` at a time, as they end.

    If one fails, tasks that have not begun are canceled. SIGTERM and Ctrl-C also end the runs that have begun.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(tasks), unit="run", disable=not tasks) as bar:
        try:
            for done in as_completed([pool.submit(work, task) for task in tasks]):
                report(done.result())
                bar.update()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [] if isinstance(error, Exception) else list(RUNNING):
                with suppress(ProcessLookupError):  # launchers, which end all that they have started
                    os.killpg(process.pid, signal.SIGTERM)
            raise


def main() -> None:
    parser = parser_of(
        __doc__, seeds="0,1,2", steps=60, name="compare", task="walk", baseline="grpo", jobs=2, output="outputs/compare"
    )
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--compare", nargs="+", help="methods", required=True)
    args = parser.parse_args()
    methods = {label_of(method): method for method in args.compare}
    if args.task not in scripts():
        parser.error(f"--task={args.task}: choose one of {', '.join(scripts())}")
    if args.baseline not in methods:
        parser.error(f"--baseline={args.baseline} is none of the methods {', '.join(methods)}")
    length = [f"trainer.total_training_steps={args.steps}", "trainer.test_freq=20", *args.overrides]
    try:
        commands = {name: [*command_of(method, args.steps, args.task), *length] for name, method in methods.items()}
    except ValueError as error:
        parser.error(str(error))
    if os.environ.get("DRY_RUN", "0") != "0":
        for name, method in methods.items():
            check(name, method, args.task, commands[name])
        return

    def run(key: tuple[str, int]) -> tuple[tuple[str, int], pd.DataFrame]:
        name, seed = key
        experiment = f"{args.name}_{name}_{args.steps}steps_seed{seed}"
        return key, trained(
            experiment, methods[name], args.task, seed, commands[name], lambda curve: curve.index[-1] >= args.steps
        )

    seeds = [int(seed) for seed in args.seeds.split(",")]
    done: dict[tuple[str, int], pd.DataFrame] = {}
    in_parallel([(name, seed) for seed in seeds for name in methods], run, args.jobs, lambda pair: done.update([pair]))
    curves = {name: {seed: done[name, seed] for seed in seeds} for name in methods}
    check_starts(curves)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    table = pd.concat([curve.assign(method=name, seed=seed) for (name, seed), curve in done.items()])
    with replacing(output / f"{args.name}.csv") as temporary:
        table.to_csv(temporary, index=False, float_format="%.6g")
    draw(curves, output / f"{args.name}.png")
    axes = axes_of(curves)
    header = ["method", "seeds", "accuracy at the end", *(AXES[axis] for axis in axes if axis != "steps")]
    header += [f"{what} at equal {AXES[axis]}" for axis in axes for what in ("final", "mean")]
    what = (
        f"{args.steps} steps; accuracy of the trainer's validation, mean over its samples. At equal …: differences "
        f"of accuracy to {args.baseline}, where the shorter of the two runs ends, and on average until then, with "
        "straight lines between validations. "
        + " ".join(f"{name}: `{' '.join(commands[name])}`." for name in methods if name not in METHODS)
    )
    rows = [row_of(name, by_seed, curves[args.baseline], axes) for name, by_seed in curves.items()]
    page = write_report(args.name, what, header, rows, output)
    print(f"table: {page}, curves: {page.with_suffix('.png')}, every validation: {page.with_suffix('.csv')}")


if __name__ == "__main__":
    main()
