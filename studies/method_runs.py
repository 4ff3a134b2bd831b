"""Compares how fast methods learn a task: at equal steps, at equal generated tokens, in equal time.

    bash recipe/common/run_compare.sh grpo passk "mine: tree=eptree credit=treerl"       (docs/compare.md)
    python scripts/fork_server/fork_server.py python -m studies.method_runs --methods grpo,latr --rates "latr=2e-4"

Tokens are those that the server generated, dropped ones included; seconds cover generation, update and all between,
without validation and start-up. A tool call that trajectories share counts once. On the search task (HOPS) a search is
as slow as over a network. The baseline is the run of the same seed, at its best rate; ± is half of a 95 % interval
(Student's t). A run that is in <name>.csv or in outputs/ is not repeated: other overrides need another name.
"""

import os
import shlex
import statistics
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
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
from studies import RESULTS
from verl.utils.atomic_files import replacing
from verl.utils.parts import parts

ROOT = Path(__file__).resolve().parents[1]
AXES = {"steps": "steps", "tokens": "generated tokens", "seconds": "seconds of training", "calls": "tool calls"}
RUN = ["method", "rate", "seed"]  # columns that identify a run
# the columns that the page shows beside the method; all are in <name>_table.csv
FRONT = ("accuracy at the end", "final at equal steps", "final at equal generated tokens", "1,000 tokens")
KT = "actor_rollout_ref.rollout.kt"
HATO = ["recipe/hato/run_countdown_cpu.sh", "actor_rollout_ref.rollout.n=16"]
TRAIN_DROPPED = "hato.tree.train_dropped=true"
# HATO's search is guided by an exact process reward: whether the target can still be reached.
GUIDED = [
    *HATO,
    "hato.local_reward=recipe.tasks.walk.data.can_arrive",
    "hato.exploration.pruning_threshold=0.04",
    "hato.tree.max_depth=6",
    "hato.tree.branching_factor=4",
    "hato.tree.spread_leaves=false",
]
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
    "grpo-colocate_async": ["schedule=colocate_async"],
    "grpo-separate_async": ["schedule=separate_async", "algorithm.rollout_correction.rollout_is=null"],
    "dapo": [*FILTERED, *CLIP_HIGHER],
    "grpo-filtered": [*FILTERED],
    # `command_of` adds the paper's schedule, scaled to the run's length
    "latr": ["recipe/latr/run_countdown_cpu.sh"],
    # Identical steps are merged, so a tree has fewer leaves than n: about half as many tokens as 8 responses.
    "hato": HATO,
    "hato-guided": GUIDED,
    "hato-dropped": [*GUIDED, TRAIN_DROPPED],
    "hato-dropped-filtered": [*GUIDED, TRAIN_DROPPED, *FILTERED],
    "hato-stopped": [*GUIDED, TRAIN_DROPPED, "hato.tree.independent_paths=true", "credit=grpo"],
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


def name_of(method: str, rate: str) -> str:
    """Return the name of a method at a learning rate, such as `latr 2e-4`; an empty rate is the default one."""
    return f"{method} {rate}" if rate else method


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


def check(method: str, task: str, steps: int, more: Sequence[str]) -> None:
    """Check a method's config, data and model in a dry run, which prints the plan.

    Raises:
        CalledProcessError: the method cannot train.
    """
    script, *overrides = [*command_of(method, steps, task), f"trainer.total_training_steps={steps}", *more]
    print(f"---- {method}", flush=True)
    env = {**os.environ, "DRY_RUN": "1", "HARDWARE": "cpu", "TASK": task, "METHOD": script_method(method)}
    subprocess.run(["bash", script, *overrides], check=True, cwd=ROOT, env=env)


def script_method(method: str) -> str:
    """Return METHOD for a run script: for a name of METHODS its part before the first hyphen, else `grpo`."""
    return method.split("-")[0] if method in METHODS else "grpo"


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


def run(name: str, task: str, method: str, rate: str, seed: int, steps: int, more: Sequence[str]) -> pd.DataFrame:
    """Return the metrics of a training run. The run is started if it does not exist.

    Raises:
        RuntimeError: the run failed, or ended before its last validation; the message names the log or the folder.
    """
    label = label_of(method)
    experiment = "_".join([name, label, *([rate] if rate else []), f"{steps}steps", f"seed{seed}"])
    command = [*command_of(method, steps, task), "trainer.test_freq=20", *more]
    command += [f"actor_rollout_ref.actor.optim.lr={rate}"] if rate else []
    log_file = ROOT / "outputs" / f"{experiment}.log"
    log_file.parent.mkdir(exist_ok=True)
    with open(log_file, "a") as log:
        try:
            folder = trained(experiment, script_method(method), seed, steps, command, output=log, TASK=task)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{label} with seed {seed} failed: {log_file} says why") from error
    metrics = load_metrics(folder)
    (accuracy,) = validation_accuracy(metrics).values()
    if accuracy.index[-1] < steps:
        raise RuntimeError(f"{folder}: ended after its last checkpoint, before its validation; remove the folder")
    return metrics


def curve_of(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each validation.

    The columns are accuracy, best (verl's best@n), entropy (the mean of the last five steps), and the sums until then:
    steps, tokens, seconds, calls.
    """
    (accuracy,) = validation_accuracy(metrics).values()
    (best,) = (name for name in metrics if name.startswith("val-core/") and "/acc/best@" in name and "mean" in name)
    calls = metrics.get("tree/tool_calls", 0) * metrics["tree/prompts"]
    entropy = metrics.get("actor/entropy", pd.Series(np.nan, index=metrics.index))
    return pd.DataFrame(
        {
            "accuracy": accuracy,
            "best": metrics[best][accuracy.index],
            # bypass mode has no pass for the old probabilities, and so no entropy
            "entropy": entropy.rolling(5, min_periods=1).mean()[accuracy.index],
            "steps": accuracy.index,
            "tokens": generated_tokens(metrics).fillna(0).cumsum()[accuracy.index],
            "seconds": metrics["timing_s/step"].fillna(0).cumsum()[accuracy.index],
            "calls": calls.fillna(0).cumsum()[accuracy.index],
        }
    )


def read_curves(path: Path) -> dict[tuple[str, str, int], pd.DataFrame]:
    """Return the curves of a file of `write_curves` by method, learning rate and seed; none if there is no file."""
    if not path.exists():
        return {}
    table = pd.read_csv(path, dtype={"rate": str}).fillna({"rate": ""})
    return {key: curve.drop(columns=RUN).reset_index(drop=True) for key, curve in table.groupby(RUN, sort=False)}


def check_lengths(path: Path, curves: dict[tuple[str, str, int], pd.DataFrame], steps: int) -> None:
    """Raise ValueError if a curve does not end at step `steps`; the message names `path`, the curves' file."""
    for (method, rate, seed), curve in curves.items():
        if (last := int(curve["steps"].iloc[-1])) != steps:
            raise ValueError(
                f"{path}: {name_of(method, rate)} with seed {seed} has {last} steps, not {steps}: use another --name"
            )


def write_curves(path: Path, curves: dict[tuple[str, str, int], pd.DataFrame]) -> None:
    """Write the curves to a CSV file.

    Raises:
        ValueError: two runs of a seed begin with different accuracies, so their warm starts or machines differ.
    """
    begun: dict[int, tuple[float, str]] = {}
    for (method, rate, seed), curve in curves.items():
        first = float(curve["accuracy"].iloc[0])
        before, other = begun.setdefault(seed, (first, name_of(method, rate)))
        if abs(first - before) > 1e-6:
            raise ValueError(
                f"{path}: with seed {seed}, {other} begins at an accuracy of {before:.4f} and {name_of(method, rate)} "
                f"at {first:.4f}: not the same warm start or machine, so that they cannot be paired; use another --name"
            )
    table = pd.concat([curve.assign(**dict(zip(RUN, key, strict=True))) for key, curve in curves.items()])
    with replacing(path) as temporary:
        table[[*RUN, *(name for name in table if name not in RUN)]].to_csv(temporary, index=False, float_format="%.6g")


def axes_of(curves: dict[str, dict[int, pd.DataFrame]]) -> list[str]:
    """Return the names of AXES (steps, tokens, seconds, calls) whose value is above 0 at the end of every run."""
    ends = [curve.iloc[-1] for by_seed in curves.values() for curve in by_seed.values()]
    return [axis for axis in AXES if all(end[axis] > 0 for end in ends)]


def at(curve: pd.DataFrame, axis: str, place: float) -> float:
    """Return the accuracy where the axis has the value `place`, on straight lines between validations."""
    return float(np.interp(place, curve[axis], curve["accuracy"]))


def with_interval(values: Sequence[float], form: str = "+.3f") -> str:
    """Return the mean as text, ± half a 95 % interval where there are two values or more."""
    if len(values) < 2:
        return format(values[0], form)
    mean, half = interval(values)
    return f"{mean:{form}} ± {half:.3f}"


def row_of(name: str, curves: dict[int, pd.DataFrame], baseline: dict[int, pd.DataFrame], axes) -> list[str]:
    """Return the table's row of a method; `curves` and `baseline` map seeds to curves.

    Two cells for each axis hold the difference of accuracy to the baseline's run of the same seed: at the end of the
    shorter of the two runs, and as the mean up to there.
    """
    ends = [curve.iloc[-1] for curve in curves.values()]
    row = [name, str(len(curves))]
    row += [with_interval([curve["accuracy"].iloc[0] for curve in curves.values()], ".3f")]
    row += [with_interval([end[column] for end in ends], ".3f") for column in ("accuracy", "best")]
    row += [with_interval([end["entropy"] for end in ends], ".3f") if has_entropy(curves) else ""]
    row += [f"{statistics.mean(end['tokens'] for end in ends) / 1000:,.0f}"]
    row += [f"{statistics.mean(end[axis] for end in ends):,.0f}" for axis in axes if axis not in ("steps", "tokens")]
    for axis in axes:
        final, area = [], []
        for seed in curves.keys() & baseline.keys():
            pair = curves[seed], baseline[seed]
            place = min(curve[axis].iloc[-1] for curve in pair)
            ours, theirs = (at(curve, axis, place) for curve in pair)
            final.append(ours - theirs)
            grid = np.linspace(0, place, 101)
            ours, theirs = (np.interp(grid, curve[axis], curve["accuracy"]).mean() for curve in pair)
            area.append(ours - theirs)
        row += [with_interval(values) if values else "" for values in (final, area)]
    return row


def best_rate(names: Sequence[str], curves: dict[str, dict[int, pd.DataFrame]]) -> str:
    """Return the one of `names`, a method at several learning rates, with the greatest mean accuracy at the end."""
    return max(names, key=lambda name: statistics.mean(curve["accuracy"].iloc[-1] for curve in curves[name].values()))


def has_entropy(curves: dict[int, pd.DataFrame]) -> bool:
    return all(curve["entropy"].notna().any() for curve in curves.values())


def draw(curves: dict[str, dict[int, pd.DataFrame]], output: Path) -> None:
    """Draw mean accuracy along each axis of `axes_of`, and entropy over steps if all runs have it.

    Bands are 95 % intervals of the mean over seeds; with two or three seeds, thin lines show each run instead. Dots are
    the first seed's validations. The legend explains all three.
    """
    colors = run_colors(list(curves))
    with matplotlib.rc_context(STYLE):
        panels = [(axis, "accuracy") for axis in axes_of(curves)]
        panels += [("steps", "entropy")] if all(map(has_entropy, curves.values())) else []
        figure = Figure(figsize=(5 * len(panels), 4.6), layout="constrained")
        first, *others = figure.subplots(1, len(panels))
        for ax, (axis, column) in zip([first, *others], panels, strict=True):
            for name, by_seed in curves.items():
                points = [curve[[axis, column]].dropna() for curve in by_seed.values()]  # no entropy before training
                grid = np.linspace(points[0][axis].iloc[0], min(curve[axis].iloc[-1] for curve in points), 101)
                lines = np.array([np.interp(grid, curve[axis], curve[column]) for curve in points])
                ax.plot(grid, lines.mean(0), color=colors[name], linewidth=2, label=name)
                dots = points[0][axis][points[0][axis] <= grid[-1]]
                ax.plot(dots, np.interp(dots, grid, lines.mean(0)), "o", color=colors[name], markersize=4)
                if 1 < len(lines) < 4:  # with few seeds an interval may be wider than the figure
                    ax.plot(grid, lines.T, color=colors[name], linewidth=0.7, alpha=0.6)
                elif len(lines) > 3:
                    half = np.array([interval(values)[1] for values in lines.T])
                    ax.fill_between(grid, lines.mean(0) - half, lines.mean(0) + half, color=colors[name], alpha=0.12)
            ax.xaxis.set_major_locator(MaxNLocator(5))
            ax.set(xlabel=AXES[axis], ylabel=column if column == "entropy" else "")
        for ax, (_, column) in zip(others, panels[1:], strict=True):
            if column == "accuracy":
                ax.sharey(first)
        first.set(ylabel="accuracy")
        named: list[Artist] = [line for line in first.get_lines() if line.get_label() in curves]
        gray, seeds = "#444444", {len(by_seed) for by_seed in curves.values()}
        named.append(Line2D([], [], color=gray, linewidth=2, marker="o", markersize=4, label="mean; dot: validation"))
        if seeds & {2, 3}:
            named.append(Line2D([], [], color=gray, linewidth=0.7, alpha=0.6, label="one seed"))
        if max(seeds) > 3:
            named.append(Patch(color=gray, alpha=0.12, label="95 % interval of the mean"))
        legend_above(figure, named, most_columns=6, fontsize=11)
        with replacing(output) as temporary:
            figure.savefig(temporary, format="png", dpi=130)


def trained_curves(
    keys: Sequence[tuple[str, str, int]], name: str, task: str, steps: int, more: Sequence[str], jobs: int
) -> dict[tuple[str, str, int], pd.DataFrame]:
    """Return the curve of each (method, rate, seed). If a run fails, runs that have not begun are canceled."""
    curves = {}
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(keys), unit="run") as bar:
        runs = {pool.submit(run, name, task, *key, steps, more): key for key in keys}
        try:
            for done in as_completed(runs):
                method, rate, seed = key = runs[done]
                curves[key] = curve_of(done.result())
                accuracy = curves[key]["accuracy"].iloc[-1]
                bar.set_postfix_str(f"{name_of(label_of(method), rate)} seed {seed}: accuracy {accuracy:.3f}")
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {key: curves[key] for key in keys}


def main() -> None:
    parser = parser_of(
        __doc__,
        seeds="0,1,2,3,4",
        methods="grpo,latr,hato,dapo",
        steps=100,
        rates="",
        name="method_runs",
        task="walk",
        note="",
        baseline="grpo",
        jobs=2,
        output=str(RESULTS),
    )
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--compare", nargs="*", default=[], help="methods, in place of --methods")
    args = parser.parse_args()
    methods = args.compare or args.methods.split(",")
    if args.task not in scripts():
        parser.error(f"--task={args.task}: choose one of {', '.join(scripts())}")
    labels = {label_of(method): method for method in methods}
    if args.baseline not in labels:
        parser.error(f"--baseline={args.baseline} is none of the methods {', '.join(labels)}")
    try:
        made_of = {label: overrides_of(method, args.task) for label, method in labels.items()}
    except ValueError as error:
        parser.error(str(error))
    if os.environ.get("DRY_RUN", "0") != "0":
        for method in methods:
            check(method, args.task, args.steps, args.overrides)
        return
    rates = {label: [""] for label in labels}
    for named in filter(None, args.rates.split(" ")):
        method, _, values = named.partition("=")
        rates[method] = values.split(",")
    keys = [
        (method, rate, int(seed)) for seed in args.seeds.split(",") for method, own in rates.items() for rate in own
    ]
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    written = read_curves(output / f"{args.name}.csv")
    check_lengths(output / f"{args.name}.csv", written, args.steps)
    missing = [(labels[method], rate, seed) for method, rate, seed in keys if (method, rate, seed) not in written]
    new = trained_curves(missing, args.name, args.task, args.steps, args.overrides, args.jobs) if missing else {}
    written |= {(label_of(method), rate, seed): curve for (method, rate, seed), curve in new.items()}
    write_curves(output / f"{args.name}.csv", written)
    curves: dict[str, dict[int, pd.DataFrame]] = {}
    for method, rate, seed in keys:
        curves.setdefault(name_of(method, rate), {})[seed] = written[method, rate, seed]
    draw(curves, output / f"{args.name}.png")
    header = ["method", "seeds", "warm start", "accuracy at the end", "best of the samples", "entropy", "1,000 tokens"]
    baseline = best_rate([name_of(args.baseline, rate) for rate in rates[args.baseline]], curves)
    axes = axes_of(curves)
    header += [AXES[axis] for axis in axes if axis not in ("steps", "tokens")]
    header += [f"{what} at equal {AXES[axis]}" for axis in axes for what in ("final", "mean")]
    what = (
        f"{args.steps} steps; accuracy of the trainer's validation, mean over its samples, and verl's best@n of them, "
        f"a bootstrap and so lower than Pass@n. At equal …: differences of accuracy to {baseline}, where the shorter "
        "of the two runs ends, and on average until then, with straight lines between validations. Entropy: of the "
        "policy, in nats, the mean of the last five steps. "
        + "".join(f"{label}: `{' '.join(made_of[label])}`. " for label in made_of if label not in METHODS)
        + args.note
    )
    rows = [row_of(name, by_seed, curves[baseline], axes) for name, by_seed in curves.items()]
    table = pd.DataFrame(rows, columns=header)
    table.to_csv(output / f"{args.name}_table.csv", index=False)
    table = table[["method", *(name for name in FRONT if name in header)]]
    page = write_report(args.name, what, list(table), table.values.tolist(), output)
    print(f"table: {page}, all columns: {output / args.name}_table.csv, curves: {page.with_suffix('.png')}")
    print(f"every validation: {page.with_suffix('.csv')}")


if __name__ == "__main__":
    main()
