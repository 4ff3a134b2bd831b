"""Compares methods at equal generated tokens, adding seeds until each difference to GRPO is known well enough.

    DRY_RUN=1 bash studies/equal_tokens.sh walk          # the plan and its hours; studies/design.md explains the design

Every run ends at the same number of generated tokens. The measure is its area: the mean accuracy over [0, tokens], on
straight lines between validations. Stage "rates" trains each method with each learning rate on seeds of its own; the
rate of the largest mean area stays. Stage "seeds" adds one seed at a time for all methods still in. After each, a
method leaves when the interval of its difference to the first method, paired by seed, is narrower than ± `half-width`
or excludes 0. The intervals hold for all looks together (95 % by method): boundaries of O'Brien and Fleming's kind by
Lan and DeMets's spending, each look's level applied to Student's t.

Each run that ends is a row of <name>.csv; a run that fails has no area, and takes its rate or its method out. SIGTERM
ends everything; the same command goes on later, and repeats only what has no row. <name>.json keeps the design: to
change it, choose another --name.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import matplotlib
import mpmath
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import commit, parser_of, write_report
from recipe.common.compare_runs import area, check, command_of, in_parallel, label_of, scripts, trained
from recipe.common.reporting.run_metrics import STYLE
from verl.utils.atomic_files import replacing

COLUMNS = "method task rate seed stage steps tokens area accuracy curve seconds commit".split()
RATE_SEEDS = (100, 101)
# With Student's t in place of the normal distribution this spends at most 5 % for 2 to 10 looks, by simulation.
ALPHA = 0.043


class Key(NamedTuple):
    """What identifies a run."""

    stage: str
    method: str
    rate: str
    seed: int


class Difference(NamedTuple):
    """A method's area minus the baseline's, paired by seed: mean, half of the sequential interval, and the pairs."""

    mean: float
    half: float
    pairs: list[float]


@cache
def nominal_levels(looks: int, alpha: float = ALPHA) -> list[float]:
    """Return the two-sided level of each of equally spaced looks, so that the chance of ever rejecting is `alpha`.

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


@cache
def t_quantile(level: float, freedom: int) -> float:
    """Return the t that Student's |t| exceeds with probability `level`."""
    with mpmath.workdps(30):
        share = mpmath.findroot(
            lambda x: mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True) - level,
            (1e-30, 1),
            solver="bisect",
            tol=1e-30,
        )
        return float(mpmath.sqrt(freedom / share - freedom))


def difference(pairs: Sequence[float], looks: int) -> Difference:
    """Return the mean of the pairs' differences with its sequential interval after so many of `looks` seeds."""
    n = len(pairs)
    half = np.inf
    if n > 1:
        half = t_quantile(nominal_levels(looks)[n - 1], n - 1) * np.std(pairs, ddof=1) / n**0.5
    return Difference(float(np.mean(pairs)), float(half), list(pairs))


def best_rates(rows: pd.DataFrame) -> dict[str, str]:
    """Return method -> the rate of the largest mean area in the stage "rates"; rates with a failed run are left out.

    Raises:
        ValueError: no rate of a method has all its runs.
    """
    areas = rows[rows["stage"] == "rates"].groupby(["method", "rate"], sort=False)["area"]
    means = areas.mean().where(areas.count() == areas.size())
    if failed := [method for method, all_rates in means.groupby("method") if all_rates.isna().all()]:
        raise ValueError(f"every rate of {', '.join(map(str, failed))} has a run that failed: leave the method out")
    return {str(method): all_rates.idxmax()[1] for method, all_rates in means.groupby("method")}


def differences(rows: pd.DataFrame, methods: Sequence[str], looks: int) -> dict[str, Difference]:
    """Return each method's difference to the first one in the stage "seeds"; a method with a failed run has none."""
    table = rows[rows["stage"] == "seeds"].pivot(index="seed", columns="method", values="area")
    failed = rows[(rows["stage"] == "seeds") & rows["area"].isna()]["method"].unique()
    compared = [name for name in methods[1:] if name in table and name not in failed]
    return {name: difference((table[name] - table[methods[0]]).dropna().tolist(), looks) for name in compared}


def still_in(found: Mapping[str, Difference], half_width: float) -> list[str]:
    """Return the methods whose interval includes 0 and is not narrower than ± half_width."""
    return [name for name, (mean, half, _) in found.items() if half >= half_width and abs(mean) <= half]


def read_rows(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"rate": str}) if path.exists() else pd.DataFrame(columns=COLUMNS)


def keep_design(path: Path, design: Mapping) -> None:
    """Write the design to a file; raise ValueError if the file has another one."""
    if path.exists() and (before := json.loads(path.read_text())) != design:
        changed = ", ".join(key for key in {**before, **design} if before.get(key) != design.get(key))
        raise ValueError(f"{path} has another design ({changed} differ): choose another --name")
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(design, indent=1) + "\n")


class Comparison:
    """The runs of a design, those that have ended and those to come."""

    def __init__(self, args):
        self.args, self.csv = args, Path(args.output) / f"{args.name}.csv"
        methods = {label_of(method): method for method in args.methods}
        self.methods, self.names, self.rates = methods, list(methods), args.rates.split(",")
        budget = f"trainer.token_budget={{tokens:{args.tokens},validations:{args.validations}}}"
        more = [budget, f"trainer.total_training_steps={5 * args.steps}", *args.overrides]
        more += ["actor_rollout_ref.actor.optim.lr_scheduler_type=constant"]
        self.commands = {name: [*command_of(each, args.steps, args.task), *more] for name, each in methods.items()}
        self.rows = read_rows(self.csv)

    def run(self, key: Key) -> dict:
        """Train, and return the run's row; a failed run has no area."""
        args, begun = self.args, time.monotonic()
        row = {**key._asdict(), "task": args.task}
        experiment = "_".join([args.name, *map(str, key)])
        command = [*self.commands[key.method], f"actor_rollout_ref.actor.optim.lr={key.rate}"]
        try:
            curve = trained(
                experiment,
                self.methods[key.method],
                args.task,
                key.seed,
                command,
                lambda curve: curve["tokens"].iloc[-1] >= args.tokens,
            )
        except RuntimeError as error:
            print(error, file=sys.stderr)
        else:
            places = np.linspace(0, args.tokens, args.validations + 1)
            accuracies = np.interp(places, curve["tokens"], curve["accuracy"])
            row |= {name: curve[name].iloc[-1] for name in ("steps", "tokens")} | {"accuracy": accuracies[-1]}
            row |= {"area": area(curve, "tokens", args.tokens), "curve": " ".join(f"{y:.4f}" for y in accuracies)}
        return row | {"seconds": round(time.monotonic() - begun), "commit": commit().removeprefix("Commit ")}

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        done = set(self.rows[list(Key._fields)].itertuples(index=False, name=None))
        return [key for key in keys if tuple(key) not in done]

    def complete(self, keys: Sequence[Key]) -> None:
        """Train those of the runs that have no row yet."""
        in_parallel(self.missing(keys), self.run, self.args.jobs, self.add)

    def add(self, row: dict) -> None:
        self.rows = pd.concat([self.rows, pd.DataFrame([row], columns=COLUMNS)], ignore_index=True)
        with replacing(self.csv) as temporary:
            self.rows.to_csv(temporary, index=False, float_format="%.6g")

    def rate_keys(self) -> list[Key]:
        return [Key("rates", name, rate, seed) for seed in RATE_SEEDS for name in self.names for rate in self.rates]

    def go_on(self) -> None:
        """Train until every difference is decided, or all seeds are spent."""
        self.complete(self.rate_keys())
        rates, left = best_rates(self.rows), self.names[1:]
        for seed in range(self.args.seeds):
            self.complete([Key("seeds", name, rates[name], seed) for name in (self.names[0], *left)])
            found = differences(self.rows, self.names, self.args.seeds)
            left = [name for name in left if name in still_in(found, self.args.half_width)]
            if not left:
                break

    def print_plan(self) -> None:
        """Print the runs to come and their hours, from the seconds of the rows, or else from --seconds."""
        rates = len(self.missing(self.rate_keys()))
        seeds = len(self.names) * self.args.seeds - int((self.rows["stage"] == "seeds").sum())
        seconds = self.rows["seconds"].mean() if len(self.rows) else self.args.seconds
        hours = [runs * seconds / self.args.jobs / 3600 for runs in (rates, rates + seeds)]
        print(
            f"plan: {rates} runs for the rates, then at most {seeds} for the seeds, {self.args.jobs} at a time, "
            f"{seconds:.0f} s each: {hours[0]:.1f} h for the rates, at most {hours[1]:.1f} h in all"
        )


def tokens_to_reach(curve: np.ndarray, accuracy: float) -> str:
    """Return where a mean curve over equal distances of the budget first has an accuracy, as a share of the budget."""
    above = np.flatnonzero(curve >= accuracy)
    if not len(above):
        return "not reached"
    end = above[0]
    place = end if end == 0 else end - 1 + (accuracy - curve[end - 1]) / (curve[end] - curve[end - 1])
    return f"{place / (len(curve) - 1):.0%}"


def write_page(comparison: Comparison) -> Path:
    """Write the table and the picture of the stage "seeds"."""
    args, names = comparison.args, comparison.names
    rows = comparison.rows[comparison.rows["stage"] == "seeds"]
    found, rates = differences(comparison.rows, names, args.seeds), best_rates(comparison.rows)
    curves = {
        name: np.array([list(map(float, text.split())) for text in group["curve"].dropna()]).mean(0)
        for name, group in rows.dropna(subset="area").groupby("method")
    }
    table = []
    for name in names:
        own, verdict = rows[rows["method"] == name], "baseline" if name == names[0] else "a run failed"
        shown = "" if name not in found else f"{100 * found[name].mean:+.1f} ± {100 * found[name].half:.1f}"
        if name in found:
            mean, half, _ = found[name]
            verdict = "not shown" if abs(mean) <= half else "better" if mean > 0 else "worse"
        reached = tokens_to_reach(curves[name], curves[names[0]][-1]) if name in curves else ""
        numbers = [f"{100 * own[column].mean():.1f}" for column in ("area", "accuracy")]
        steps = f"{own['steps'].mean():.0f}"
        table.append([name, rates[name], str(len(own)), *numbers, shown, verdict, reached, steps])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 1 + 0.5 * len(found)), layout="constrained")
        ax = figure.subplots()
        for place, (mean, half, pairs) in enumerate(found.values()):
            ax.errorbar(100 * mean, -place, xerr=100 * half, fmt="o", color="#1f6fb4", capsize=4, linewidth=2)
            ax.plot(100 * np.array(pairs), [-place - 0.2] * len(pairs), "|", color="#888888")
        ax.axvline(0, color="#444444", linewidth=1)
        ax.set_yticks([-place for place in range(len(found))], list(found))
        ax.set(xlabel=f"area minus that of {names[0]}, points; ticks: seeds; bars: 95 % for all looks together")
        with replacing(comparison.csv.with_suffix(".png")) as temporary:
            figure.savefig(temporary, format="png", dpi=130)
    what = (
        f"{args.task}: {args.tokens:,} generated tokens in every run. Area: mean accuracy over them, in points. "
        f"Difference: to {names[0]}, paired by seed, with an interval that holds for all looks. Reached: share of the "
        f"tokens after which the mean curve has the accuracy that {names[0]} has at the end.\n\n"
        f"![differences]({args.name}.png)"
    )
    header = ["method", "rate", "seeds", "area", "accuracy at the end", "difference", "", "reached", "steps"]
    return write_report(args.name, what, header, table, comparison.csv.parent)


def main() -> None:
    parser = parser_of(
        __doc__,
        name="equal_tokens",
        task="walk",
        tokens=0,
        validations=8,
        steps=60,
        rates="1e-4,2e-4,4e-4",
        seeds=10,
        half_width=0.02,
        seconds=300,
        jobs=2,
        output="studies/results",
    )
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--methods", nargs="+", required=True, help="the first one is the baseline")
    args = parser.parse_args()
    if args.task not in scripts() or args.tokens < 1:
        parser.error(f"--task={args.task} --tokens={args.tokens}: choose one of {', '.join(scripts())}, and a budget")
    try:
        comparison = Comparison(args)
        if os.environ.get("DRY_RUN", "0") != "0":
            for name, method in comparison.methods.items():
                check(name, method, args.task, comparison.commands[name])
            comparison.print_plan()
            return
        unchanging = ("name", "jobs", "output", "seconds")
        keep_design(comparison.csv.with_suffix(".json"), {k: v for k, v in vars(args).items() if k not in unchanging})
        os.nice(19)
        comparison.go_on()
    except ValueError as error:
        parser.error(str(error))
    print(f"table: {write_page(comparison)}")


if __name__ == "__main__":
    main()
