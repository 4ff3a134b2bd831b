"""Compares how fast methods learn a task: at equal steps, at equal generated tokens, in equal time.

    bash recipe/common/run_compare.sh grpo passk "mine: tree=eptree credit=treerl"       every seed, docs/compare.md
    bash studies/equal_tokens.sh countdown  seeds until each difference is known well enough, studies/design.md

With `--tokens` every run ends at so many generated tokens. Stage "rates" trains each method with each learning rate on
seeds of its own; the rate of the largest mean area stays. Stage "seeds" adds one seed at a time. A method leaves when
the interval of its difference in area to the first method, paired by seed, is narrower than ± `--half-width` or
excludes 0. The area is the mean accuracy over [0, tokens], on straight lines between validations.

Each run that ends is a row of <name>.csv; with `--tokens`, one that fails has no area, and takes its rate or its method
out. SIGTERM or the end of the terminal ends everything; the same command goes on later, and repeats only what has no
row. <name>.json keeps the design, and each run's folder its part: to change it, choose another --name.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import commit, interval, parser_of, write_report
from recipe.common import compare_runs
from recipe.common.compare_runs import ROOT, area, command_of, environment_of, in_parallel, scripts, trained
from recipe.common.reporting.run_curves import STYLE
from verl.utils.atomic_files import replacing

AXES = {"steps": "steps", "tokens": "generated tokens", "seconds": "seconds of training", "calls": "tool calls"}
COLUMNS = "method task rate seed stage steps tokens start area accuracy seconds commit curve".split()
RATE_SEEDS = (100, 101)
# With Student's t in place of the normal distribution this spends at most 5 % for 2 to 10 looks, by simulation.
ALPHA = 0.043
Curves = Mapping[str, Mapping[int, pd.DataFrame]]  # method -> seed -> curve


class Key(NamedTuple):
    """The columns that identify a run."""

    stage: str
    method: str
    rate: str
    seed: int


@cache
def nominal_levels(looks: int, alpha: float = ALPHA) -> list[float]:
    """Return the two-sided level of each of equally spaced looks, so that the chance of ever rejecting is `alpha`:
    boundaries of O'Brien and Fleming's kind.

    Lan and DeMets 1983: on each side, the error spent until the share t of the looks is 2 - 2 Φ(z / √t), where z is the
    quantile of a quarter of alpha.
    The boundary of each look follows from the density of the sum of normal draws that no earlier look has stopped.
    """
    step, normal = 0.005, NormalDist()
    grid = np.arange(-8 * looks**0.5, 8 * looks**0.5 + step, step)
    draw = np.arange(-8, 8 + step, step)
    kernel = np.exp(-(draw**2) / 2) / (2 * np.pi) ** 0.5 * step
    density, levels, spent = np.exp(-(grid**2) / 2) / (2 * np.pi) ** 0.5, [], 0.0
    for look in range(1, looks + 1):
        before, spent = spent, 2 * normal.cdf(normal.inv_cdf(alpha / 4) / (look / looks) ** 0.5)
        beyond = (np.cumsum(density[::-1]) - density[::-1] / 2) * step  # the mass above each place, from the right
        bound = float(np.interp(spent - before, beyond, grid[::-1]))
        levels.append(2 * normal.cdf(-bound / look**0.5))
        density = np.convolve(np.where(np.abs(grid) < bound, density, 0.0), kernel, mode="same")
    return levels


def mean_and_half(values: Sequence[float], looks: int) -> tuple[float, float]:
    """Return the mean, and half of its 95 % interval that holds for `looks` looks together; one value has an infinite
    interval."""
    return interval(values, nominal_levels(looks)[len(values) - 1])


def with_interval(values: Sequence[float], form: str = "+.3f") -> str:
    """Return the mean as text, ± half a 95 % interval where there are two values or more."""
    mean, half = interval(values)
    return format(mean, form) + (f" ± {half:.3f}" if len(values) > 1 else "")


def best_rates(rows: pd.DataFrame) -> dict[str, str]:
    """Return method -> the rate of the largest mean area in the stage "rates". Rates with a failed run are left out,
    and so are methods that have no others."""
    areas = rows[rows["stage"] == "rates"].groupby(["method", "rate"], sort=False)["area"]
    means = areas.mean()[areas.count() == areas.size()]
    return {str(method): all_rates.idxmax()[1] for method, all_rates in means.groupby("method")}


def differences(rows: pd.DataFrame, names: Sequence[str], looks: int) -> dict[str, tuple[float, float]]:
    """Return method -> mean and half interval, for `looks` looks, of its area minus that of the first one, over the
    seeds of the stage "seeds" that both have; a method with a failed run has none."""
    table = rows[rows["stage"] == "seeds"].pivot(index="seed", columns="method", values="area")
    failed = set(rows[(rows["stage"] == "seeds") & rows["area"].isna()]["method"])
    if names[0] in failed:
        raise ValueError(f"a run of {names[0]} has failed: nothing can be compared with it; take another --name")
    compared = [name for name in names[1:] if name in set(table) - failed]
    return {name: mean_and_half((table[name] - table[names[0]]).dropna().tolist(), looks) for name in compared}


def still_in(intervals: Mapping[str, tuple[float, float]], half_width: float) -> list[str]:
    """Return the methods whose interval includes 0 and is not narrower than ± half_width."""
    return [name for name, (mean, half) in intervals.items() if half >= half_width and abs(mean) <= half]


class Comparison:
    """The runs of a design, those that have ended and those to come."""

    def __init__(self, args):
        self.args, self.csv = args, Path(args.output) / f"{args.name}.csv"
        methods = {method.partition(":")[0]: method for method in args.methods}
        self.names, self.methods = list(methods), methods
        if len(methods) < len(args.methods):
            raise ValueError(f"--methods {' '.join(args.methods)}: give each method a name of its own")
        self.rates = args.rates.split(",") if args.tokens else []
        more = [f"trainer.total_training_steps={args.steps}", "trainer.test_freq=20"]
        if args.tokens:
            budget = f"trainer.token_budget={{tokens:{args.tokens},validations:{args.validations}}}"
            constant = "actor_rollout_ref.actor.optim.lr_scheduler_type=constant"
            more = [budget, constant, f"trainer.total_training_steps={5 * args.steps}"]
        more += args.overrides
        self.commands = {name: [*command_of(each, args.steps, args.task), *more] for name, each in methods.items()}
        self.rows = pd.DataFrame(columns=COLUMNS)
        if self.csv.exists():
            self.rows = pd.read_csv(self.csv, dtype={"rate": str}).fillna({"rate": ""})

    def run(self, key: Key) -> dict:
        """Train, and return the run's row."""
        args, begun = self.args, time.monotonic()
        environment = environment_of(self.methods[key.method], args.task) | {"SEED": str(key.seed)}
        command = self.commands[key.method] + [f"actor_rollout_ref.actor.optim.lr={key.rate}"] * bool(key.rate)
        axis, end = ("tokens", args.tokens) if args.tokens else ("steps", args.steps)
        row = {**key._asdict(), "task": args.task, "commit": commit().removeprefix("Commit ")}
        try:
            experiment = "_".join(filter(None, (args.name, *map(str, key))))
            curve = trained(experiment, command, environment, lambda curve: curve[axis].iloc[-1] >= end)
        except RuntimeError as error:
            if not args.tokens:
                raise
            print(error, file=sys.stderr)
        else:
            row |= curve[["steps", "tokens", "accuracy"]].iloc[-1].to_dict()
            row |= {"start": curve["accuracy"].iloc[0], "area": area(curve, axis, end)}
            row |= {"curve": json.dumps(curve.round(4).to_dict("list"))}
        return row | {"seconds": round(time.monotonic() - begun)}

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        done = set(self.rows[list(Key._fields)].itertuples(index=False, name=None))
        return [key for key in keys if tuple(key) not in done]

    def complete(self, keys: Sequence[Key]) -> None:
        """Train those of the runs that have no row yet."""
        in_parallel(self.missing(keys), self.run, self.args.jobs, self.add)

    def add(self, row: dict) -> None:
        self.rows = pd.DataFrame([*self.rows.to_dict("records"), row], columns=COLUMNS)
        with replacing(self.csv) as temporary:
            self.rows.to_csv(temporary, index=False, float_format="%.6g")

    def rate_keys(self) -> list[Key]:
        return [Key("rates", name, rate, seed) for seed in RATE_SEEDS for name in self.names for rate in self.rates]

    def go_on(self) -> None:
        """Train until every difference is decided, or all seeds are spent.

        Raises:
            ValueError: the first method's best rate gains too little for a comparison, or runs cannot be paired.
        """
        args = self.args
        self.complete(self.rate_keys())
        rates = best_rates(self.rows)
        left = [name for name in self.names[1:] if name in rates or not self.rates]
        own = self.rows[(self.rows["stage"] == "rates") & (self.rows["method"] == self.names[0])]
        own = own[own["rate"] == rates.get(self.names[0])]
        if self.rates and not (gain := (own["area"] - own["start"]).mean()) >= args.least_gain:
            raise ValueError(
                f"the area of {self.names[0]} is {gain:.3f} above its start at its best rate, less than --least-gain: "
                "there is nothing to compare; take another task, more tokens or other rates, and another --name"
            )
        for seed in args.seeds:
            self.complete([Key("seeds", name, rates.get(name, ""), seed) for name in (self.names[0], *left)])
            self.curves()  # checks that they can be paired
            if args.tokens:
                intervals = differences(self.rows, self.names, len(args.seeds))
                left = [name for name in still_in(intervals, args.half_width) if name in left]
            if not left:
                break

    def curves(self) -> dict[str, dict[int, pd.DataFrame]]:
        """Return the curves of the stage "seeds", by method and seed.

        Raises:
            ValueError: runs of a seed begin with different accuracies, so that they cannot be paired.
        """
        curves: dict[str, dict[int, pd.DataFrame]] = {}
        begun: dict[int, float] = {}
        for row in self.rows[self.rows["stage"] == "seeds"].dropna(subset="curve").itertuples():
            curves.setdefault(row.method, {})[row.seed] = curve = pd.DataFrame(json.loads(row.curve))
            first = float(curve["accuracy"][0])
            if begun.setdefault(row.seed, first) != first:
                raise ValueError(
                    f"{self.csv}: with seed {row.seed}, {row.method} begins at an accuracy of {first} and another at "
                    f"{begun[row.seed]}: not the same warm start or machine; use another --name"
                )
        return {name: curves[name] for name in self.names if name in curves}

    def print_plan(self) -> None:
        """Check each method in a dry run; print the runs to come and their hours, by the rows' seconds or --seconds."""
        args = self.args
        for name, command in self.commands.items():
            print(f"---- {name}", flush=True)
            environment = {**os.environ, **environment_of(self.methods[name], args.task), "DRY_RUN": "1"}
            subprocess.run(["bash", *command], check=True, cwd=ROOT, env=environment)
        rates = len(self.missing(self.rate_keys()))
        seeds = len(self.names) * len(args.seeds) - int((self.rows["stage"] == "seeds").sum())
        seconds = self.rows["seconds"].mean() if len(self.rows) else args.seconds
        hours = [runs * seconds / args.jobs / 3600 for runs in (rates, rates + seeds)]
        print(
            f"plan: {rates} runs for the rates, then at most {seeds} for the seeds, {args.jobs} at a time, "
            f"{seconds:.0f} s each: {hours[0]:.1f} h for the rates, at most {hours[1]:.1f} h in all"
        )


def axes_of(curves: Curves) -> list[str]:
    """Return the names of AXES (steps, tokens, seconds, calls) whose value is above 0 at the end of every run."""
    ends = [curve.iloc[-1] for by_seed in curves.values() for curve in by_seed.values()]
    return [axis for axis in AXES if all(end[axis] > 0 for end in ends)]


def row_of(name: str, curves: Curves, baseline: str) -> list[str]:
    """Return the table's row of a method. Two cells for each axis hold the difference of accuracy to the baseline's run
    of the same seed: at the end of the shorter of the two runs, and as the mean up to there."""
    axes, own = axes_of(curves), curves[name]
    row = [name, str(len(own)), with_interval([curve["accuracy"].iloc[-1] for curve in own.values()], ".3f")]
    row += [f"{np.mean([curve[axis].iloc[-1] for curve in own.values()]):,.0f}" for axis in axes]
    pairs = [(curve, curves[baseline][seed]) for seed, curve in own.items() if seed in curves[baseline]]
    for axis in axes:
        ends = [min(each[axis].iloc[-1] for each in pair) for pair in pairs]
        final = [[np.interp(end, c[axis], c["accuracy"]) for c in pair] for pair, end in zip(pairs, ends, strict=True)]
        mean = [[area(curve, axis, end) for curve in pair] for pair, end in zip(pairs, ends, strict=True)]
        row += [with_interval([ours - theirs for ours, theirs in values]) for values in (final, mean)]
    return row


def draw(curves: Curves, intervals: Mapping[str, tuple[float, float]], baseline: str, output: Path) -> None:
    """Draw mean accuracy along each axis of `axes_of`, every seed as a thin line; then the differences in area of
    `intervals`, means and half intervals."""
    axes = axes_of(curves)
    colors = {name: f"C{place}" for place, name in enumerate(curves)}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5 * (len(axes) + bool(intervals)), 4.6), layout="constrained")
        panels = figure.subplots(1, len(axes) + bool(intervals), squeeze=False)[0]
        for ax, axis in zip(panels, axes, strict=False):
            for name, by_seed in curves.items():
                grid = np.linspace(0, min(curve[axis].iloc[-1] for curve in by_seed.values()), 101)
                lines = np.array([np.interp(grid, curve[axis], curve["accuracy"]) for curve in by_seed.values()])
                ax.plot(grid, lines.mean(0), color=colors[name], linewidth=2, label=name)
                ax.plot(grid, lines.T, color=colors[name], linewidth=0.7, alpha=0.4)
            ax.set(xlabel=AXES[axis], ylabel="accuracy (thin: one seed)")
        for place, (name, (mean, half)) in enumerate(intervals.items()):
            panels[-1].errorbar(100 * mean, -place, xerr=100 * half, fmt="o", color=colors[name], capsize=4)
        if intervals:
            panels[-1].set_yticks([-place for place in range(len(intervals))], list(intervals))
            panels[-1].axvline(0, color="#444444", linewidth=1)
            panels[-1].set(xlabel=f"area minus {baseline}'s, points (95 % for all looks together)")
        named = [line for line in panels[0].get_lines() if line.get_label() in curves]
        figure.legend(handles=named, loc="outside upper center", ncols=5)
        with replacing(output) as temporary:
            figure.savefig(temporary, format="png", dpi=130)


def write_page(comparison: Comparison) -> Path:
    """Write the table and the picture of the stage "seeds"."""
    args, baseline, curves = comparison.args, comparison.names[0], comparison.curves()
    rates = best_rates(comparison.rows)
    intervals = differences(comparison.rows, comparison.names, len(args.seeds)) if args.tokens else {}
    draw(curves, intervals, baseline, comparison.csv.with_suffix(".png"))
    axes = axes_of(curves)
    header = ["method", "seeds", "accuracy at the end", *map(AXES.get, axes)]
    header += [f"{what} at equal {AXES[axis]}" for axis in axes for what in ("final", "mean")]
    rows = [row_of(name, curves, baseline) for name in curves]
    if args.tokens:
        header[1:1] = ["rate", "area: difference, points", ""]
        for row in rows:
            mean, half = intervals.get(row[0], (0, 0))
            words = "not shown" if abs(mean) <= half else "better" if mean > 0 else "worse"
            row[1:1] = [rates[row[0]], f"{100 * mean:+.1f} ± {100 * half:.1f}", words if row[0] in intervals else ""]
    commands = " ".join(f"{name}: `{' '.join(comparison.commands[name])}`." for name in comparison.names)
    what = (
        f"{args.task}; accuracy of the trainer's validation, mean over its samples. At equal …: differences to "
        f"{baseline}, paired by seed, with 95 % intervals: where the shorter of the two runs ends, and on average "
        "until then, with straight lines between validations. The area's interval is for all looks, and decides. "
        f"{commands}\n\n![accuracy]({args.name}.png)"
    )
    return write_report(args.name, what, header, rows, comparison.csv.parent)


def main() -> None:
    parser = parser_of(
        __doc__, name="compare", task="walk", seeds="0,1,2", steps=60, jobs=2, output="outputs/compare", tokens=0,
        validations=8, rates="1e-4,2e-4,4e-4", half_width=0.02, least_gain=0.0, seconds=300
    )  # fmt: skip
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--methods", nargs="+", required=True, help="the first one is the baseline")
    args = parser.parse_args()
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.task not in scripts():
        parser.error(f"--task={args.task}: choose one of {', '.join(scripts())}")
    try:
        comparison = Comparison(args)
        if os.environ.get("DRY_RUN") not in (None, "", "0"):
            return comparison.print_plan()
        design = {key: value for key, value in vars(args).items() if key not in ("name", "jobs", "output", "seconds")}
        compare_runs.keep_design(comparison.csv.with_suffix(".json"), design | compare_runs.inherited())
        comparison.go_on()
        page = write_page(comparison)
    except ValueError as error:
        parser.error(str(error))
    print(f"table: {page}, picture: {page.with_suffix('.png')}, every run: {comparison.csv}")


if __name__ == "__main__":
    main()
