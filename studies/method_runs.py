"""Which method learns the number walk fastest: at equal steps, at equal generated tokens, in equal time.

    python scripts/fork_server/fork_server.py python -m studies.method_runs
        [--seeds 0,1,2,3,4] [--methods grpo,latr] [--steps 100] [--rates "grpo=1e-4,3e-5 latr=2e-4"]
        [--name method_runs] [--task walk] [--overrides actor_rollout_ref.actor.ppo_mini_batch_size=4]
    HOPS=3-5 python scripts/fork_server/fork_server.py python -m studies.method_runs
        --methods grpo-tools,arpo,aepo --baseline grpo-tools --name search_runs
    DATA_DIR=outputs/data/easy_problems python -m studies.method_runs --methods grpo-smollm2,latr-smollm2
        --baseline grpo-smollm2 --name smollm2_runs --steps 20 --seeds 0,1 --overrides trainer.test_freq=10

Every method trains from the same warm start of the task (`walk`, `countdown`) with its run script, one update of 16
prompts a step, once for each seed; `--jobs` (2) runs at a time. Tokens are those that the server generated, dropped
ones included; seconds are of generation, update and what lies between, without validation and start-up. A tool call
that trajectories share counts once. `grpo-tools`, `arpo` and `aepo` train on the search task (HOPS) instead, where a
search takes time as over a network (`benchmarks/slow_search.py`), so that equal seconds are equal latency. Baseline: of
the same seed, at its best rate. Differences are paired by seed; ± is half of a 95 % interval (Student's t). Writes
studies/results/<name>.md, .png and, for those who go on, .csv: every run's validations. A run that is in the .csv or
in outputs/ is not repeated: other overrides need another name.
"""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.report import interval, parser_of, write_report
from benchmarks.slow_search import SLOW_SEARCH
from recipe.common.reporting.run_metrics import STYLE, legend_above, load_metrics, run_colors, validation_accuracy
from studies import RESULTS
from studies.learning_curves import ROOT, trained
from studies.where_trees_pay import LATR_SCHEDULE
from verl.utils.atomic_files import replacing

AXES = {"steps": "steps", "tokens": "generated tokens", "seconds": "seconds of training", "calls": "tool calls"}
RUN = ["method", "rate", "seed"]  # the columns that name a run
FILTER = "training/filter_groups"
HATO_DROPPED = "hato/trees_dropped"
DROPPED = ("evicted_samples", "discarded_surplus_samples")  # upstream's buffer counts prompts
KT = "actor_rollout_ref.rollout.kt"
HATO = ["recipe/hato/run_countdown_cpu.sh", "actor_rollout_ref.rollout.n=16"]
TRAIN_DROPPED = "hato.tree.train_dropped=true"
ERRING = "studies.process_reward.can_arrive_with_errors"
# V knows whether the target can still be reached, by a process reward without errors
GUIDED = [
    *HATO,
    "hato.local_reward=recipe.common.tasks.walk.can_arrive",
    "hato.exploration.pruning_threshold=0.04",
    "hato.tree.max_depth=6",
    "hato.tree.branching_factor=4",
    "hato.tree.spread_leaves=false",
]
SEARCH = ["recipe/arpo/run_search_task_cpu.sh", SLOW_SEARCH]
EXPLORE = ["recipe/common/run_explore.sh", "update=tree"]
IS = "algorithm.rollout_correction.rollout_is"
LATR = ["recipe/latr/run_countdown_cpu.sh"]
# DAPO's dynamic sampling: groups that are all right or all wrong are replaced
FILTERED = [
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_inflight_gen_batches=2",
]
CLIP_HIGHER = ["actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio_c=10.0"]


def schedule_of(shares: dict[int, float]) -> list[str]:
    """Overrides for the share of LATR's trees from each step on; the script's own, of the same keys, goes first."""
    steps = ", ".join(f"{step}: {share}" for step, share in shares.items())
    return [f"~{KT}.mix_ratio_schedule", f"+{KT}.mix_ratio_schedule={{{steps}}}"]


METHODS = {
    "grpo": EXPLORE,
    "grpo-colocate_async": [*EXPLORE, "schedule=colocate_async"],
    "grpo-separate_async": [*EXPLORE, "schedule=separate_async", f"{IS}=null"],
    # every token's loss times min(2, pi_before_the_update / pi_that_generated_it)
    "grpo-colocate_async-corrected": [*EXPLORE, "schedule=colocate_async", f"{IS}=token"],
    "grpo-separate_async-corrected": [*EXPLORE, "schedule=separate_async", f"{IS}=token"],
    "dapo": [*EXPLORE, *FILTERED, *CLIP_HIGHER],
    "grpo-filtered": [*EXPLORE, *FILTERED],
    "latr": LATR,  # and the paper's schedule, scaled to the run's length
    "latr-to-the-end": [*LATR, *schedule_of({0: 1})],
    # identical steps are one, so that a tree has fewer leaves than n: about half as many tokens as 8 responses
    "hato": HATO,
    "hato-guided": GUIDED,
    "hato-dropped": [*GUIDED, TRAIN_DROPPED],
    "hato-dropped-errors": [
        *GUIDED,
        TRAIN_DROPPED,
        f"hato.local_reward={ERRING}",
    ],
    "hato-dropped-filtered": [*GUIDED, TRAIN_DROPPED, *FILTERED],
    "hato-stopped": [*GUIDED, TRAIN_DROPPED, "hato.tree.independent_paths=true", "credit=grpo"],
    # what guides the search above, in GRPO's own reward
    "grpo-process": [*EXPLORE, "reward.custom_reward_function.path=pkg://studies.process_reward"],
    "hapo": ["recipe/hapo/run_countdown_cpu.sh"],
    # SmolLM2-135M on word problems, whose scripts know no other task
    "grpo-smollm2": ["recipe/common/run_smollm2_cpu.sh"],
    "latr-smollm2": ["recipe/latr/run_smollm2_cpu.sh"],
    "hapo-smollm2": ["recipe/hapo/run_smollm2_cpu.sh"],
    "hato-smollm2": ["recipe/hato/run_smollm2_cpu.sh"],
    "combination-smollm2": ["recipe/common/run_smollm2_combination_cpu.sh"],
    "grpo-tools": SEARCH,
    "arpo": SEARCH,
    "aepo": SEARCH,
    "eptree": [*EXPLORE, "tree=eptree", "credit=treerl", "actor_rollout_ref.rollout.n=8"]
    + [f"actor_rollout_ref.rollout.custom.eptree.{key}" for key in ("M=2", "N=3", "L=1", "T=1")],
}


def name_of(method: str, rate: str) -> str:
    return f"{method} {rate}" if rate else method


def command_of(method: str, steps: int) -> list[str]:
    """The method's script and overrides."""
    if method != "latr":
        return METHODS[method]
    return [*LATR, *schedule_of({round(begun * steps): share for begun, share in LATR_SCHEDULE.items()})]


def run(name: str, task: str, method: str, rate: str, seed: int, steps: int, more: Sequence[str]) -> pd.DataFrame:
    """Metrics of a training run, which is made if it is not there."""
    experiment = "_".join([name, method, *([rate] if rate else []), f"{steps}steps", f"seed{seed}"])
    command = [*command_of(method, steps), "trainer.test_freq=20", *more]
    command += [f"actor_rollout_ref.actor.optim.lr={rate}"] if rate else []
    with open(ROOT / "outputs" / f"{experiment}.log", "a") as log:
        folder = trained(experiment, method, seed, steps, command, output=log, TASK=task)
    metrics = load_metrics(folder)
    (accuracy,) = validation_accuracy(metrics).values()
    if accuracy.index[-1] < steps:
        raise RuntimeError(f"{folder}: ended after its last checkpoint, before its validation; remove the folder")
    return metrics


def generated_by_kept(metrics: pd.DataFrame) -> pd.Series:
    """The prompts that responses were generated for, by those that were trained."""
    if f"{FILTER}/gen_batches" in metrics:
        return metrics[f"{FILTER}/gen_batches"]
    dropped = [metrics[name].fillna(0) for name in (f"{FILTER}/{what}" for what in DROPPED) if name in metrics]
    return 1 + sum(dropped) / metrics["tree/prompts"]


def curve_of(metrics: pd.DataFrame) -> pd.DataFrame:
    """A row for each validation: accuracy, Pass@n, and the steps, tokens and seconds before it."""
    (accuracy,) = validation_accuracy(metrics).values()
    (best,) = (name for name in metrics if name.startswith("val-core/") and "/acc/best@" in name and "mean" in name)
    generated = metrics["tree/tokens_generated"] * metrics["tree/prompts"]
    if HATO_DROPPED not in metrics:  # else they are counted already
        generated *= generated_by_kept(metrics)
    calls = metrics.get("tree/tool_calls", 0) * metrics["tree/prompts"]
    entropy = metrics.get("actor/entropy", pd.Series(np.nan, index=metrics.index))
    return pd.DataFrame(
        {
            "accuracy": accuracy,
            "best": metrics[best][accuracy.index],
            # not measured in bypass mode, without the pass of the old probabilities
            "entropy": entropy.rolling(5, min_periods=1).mean()[accuracy.index],
            "steps": accuracy.index,
            "tokens": generated.fillna(0).cumsum()[accuracy.index],
            "seconds": metrics["timing_s/step"].fillna(0).cumsum()[accuracy.index],
            "calls": calls.fillna(0).cumsum()[accuracy.index],
        }
    )


def read_curves(path: Path) -> dict[tuple[str, str, int], pd.DataFrame]:
    """The curves in a file of `write_curves`, by method, learning rate and seed; none where there is no file."""
    if not path.exists():
        return {}
    table = pd.read_csv(path, dtype={"rate": str}).fillna({"rate": ""})
    return {key: curve.drop(columns=RUN).reset_index(drop=True) for key, curve in table.groupby(RUN, sort=False)}


def check_lengths(path: Path, curves: dict[tuple[str, str, int], pd.DataFrame], steps: int) -> None:
    """Raises ValueError where a curve ends with another step: `path` is the file of all."""
    for (method, rate, seed), curve in curves.items():
        if (last := int(curve["steps"].iloc[-1])) != steps:
            raise ValueError(
                f"{path}: {name_of(method, rate)} with seed {seed} has {last} steps, not {steps}: use another --name"
            )


def write_curves(path: Path, curves: dict[tuple[str, str, int], pd.DataFrame]) -> None:
    """Write the curves.

    Raises:
        ValueError: two runs of a seed begin with different accuracies, so that their warm starts or machines differ.
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
    """Those of AXES along which every run has moved."""
    ends = [curve.iloc[-1] for of_seeds in curves.values() for curve in of_seeds.values()]
    return [axis for axis in AXES if all(end[axis] > 0 for end in ends)]


def at(curve: pd.DataFrame, axis: str, place: float) -> float:
    return float(np.interp(place, curve[axis], curve["accuracy"]))


def with_interval(values: Sequence[float], form: str = "+.3f") -> str:
    """Mean, ± half a 95 % interval where there are two values or more."""
    if len(values) < 2:
        return format(values[0], form)
    mean, half = interval(values)
    return f"{mean:{form}} ± {half:.3f}"


def row_of(name: str, curves: dict[int, pd.DataFrame], baseline: dict[int, pd.DataFrame], axes) -> list[str]:
    """A method's figures, and its differences to the baseline where both end: at the end, and on average until then."""
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
    """Of the runs of a method with several learning rates, those that end with the greatest accuracy on average."""
    return max(names, key=lambda name: statistics.mean(curve["accuracy"].iloc[-1] for curve in curves[name].values()))


def has_entropy(curves: dict[int, pd.DataFrame]) -> bool:
    return all(curve["entropy"].notna().any() for curve in curves.values())


def draw(curves: dict[str, dict[int, pd.DataFrame]], output: Path) -> None:
    """Mean accuracy over steps, tokens and seconds, and entropy over steps where all runs have it.

    Bands are 95 % intervals of the mean over seeds; thin lines are the runs of two seeds.
    """
    colors = run_colors(list(curves))
    with matplotlib.rc_context(STYLE):
        panels = [(axis, "accuracy") for axis in axes_of(curves)]
        panels += [("steps", "entropy")] if all(map(has_entropy, curves.values())) else []
        figure = Figure(figsize=(5 * len(panels), 4.6), layout="constrained")
        first, *others = figure.subplots(1, len(panels))
        for ax, (axis, column) in zip([first, *others], panels, strict=True):
            for name, of_seeds in curves.items():
                known = [curve[[axis, column]].dropna() for curve in of_seeds.values()]  # no entropy before training
                grid = np.linspace(known[0][axis].iloc[0], min(curve[axis].iloc[-1] for curve in known), 101)
                lines = np.array([np.interp(grid, curve[axis], curve[column]) for curve in known])
                ax.plot(grid, lines.mean(0), color=colors[name], linewidth=2, label=name)
                if 1 < len(lines) < 4:  # an interval of so few may be wider than the figure
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
        named = [line for line in first.get_lines() if line.get_label() in curves]
        legend_above(figure, named, most_columns=6, fontsize=11)
        with replacing(output) as temporary:
            figure.savefig(temporary, format="png", dpi=130)


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
    )
    parser.add_argument("--overrides", nargs="*", default=[])
    args = parser.parse_args()
    rates = {method: [""] for method in args.methods.split(",")}
    for named in filter(None, args.rates.split(" ")):
        method, _, values = named.partition("=")
        rates[method] = values.split(",")
    if args.baseline not in rates:
        parser.error(f"--baseline={args.baseline} is none of --methods={args.methods}")
    wanted = [
        (method, rate, int(seed)) for seed in args.seeds.split(",") for method, own in rates.items() for rate in own
    ]
    written = read_curves(RESULTS / f"{args.name}.csv")
    check_lengths(RESULTS / f"{args.name}.csv", written, args.steps)
    missing = [key for key in wanted if key not in written]
    with ThreadPoolExecutor(args.jobs) as pool:
        tables = pool.map(lambda key: run(args.name, args.task, *key, args.steps, args.overrides), missing)
        written |= {key: curve_of(metrics) for key, metrics in zip(missing, tables, strict=True)}
    write_curves(RESULTS / f"{args.name}.csv", written)
    curves: dict[str, dict[int, pd.DataFrame]] = {}
    for method, rate, seed in wanted:
        curves.setdefault(name_of(method, rate), {})[seed] = written[method, rate, seed]
    draw(curves, RESULTS / f"{args.name}.png")
    header = [
        "method",
        "seeds",
        "warm start",
        "accuracy at the end",
        "best of the samples",
        "entropy",
        "1,000 tokens",
    ]
    baseline = best_rate([name_of(args.baseline, rate) for rate in rates[args.baseline]], curves)
    axes = axes_of(curves)
    header += [AXES[axis] for axis in axes if axis not in ("steps", "tokens")]
    header += [f"{what} at equal {AXES[axis]}" for axis in axes for what in ("final", "mean")]
    what = (
        f"{args.steps} steps; accuracy of the trainer's validation, mean over its samples, and verl's best@n of them, "
        f"a bootstrap and so lower than Pass@n. At equal …: differences of accuracy to {baseline}, where the shorter "
        "of the two runs ends, and on average until then, with straight lines between validations. Entropy: of the "
        "policy, in nats, the mean of the last five steps. "
        f"{args.note}"
    )
    rows = [row_of(name, of_seeds, curves[baseline], axes) for name, of_seeds in curves.items()]
    write_report(args.name, what, header, rows, RESULTS)


if __name__ == "__main__":
    main()
