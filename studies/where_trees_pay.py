"""Studies when a tree teaches faster than independent answers, with a tabular policy under many conditions.

    python -m studies.where_trees_pay [--seeds 5] [--prompts 48] [--largest-change 0.25]
        [--conditions "K 6, 0.01;walk"] [--name where_trees_pay_simulation]

Every prompt has a policy of its own: K decisions, a softmax each. A condition is K, the share of right answers at
first, the shape of the first policy, and the verifier. A method is a way to draw decisions (tabular_trees.py), a value
that guides the drawing, and the choice of rows to train (tabular_learning.py). Each method uses the best of several
learning rates and credits, chosen on other seeds than the reported ones. No update moves a logit by more than
`--largest-change`: without a bound, the largest rate would always be best where the verifier never errs. Where the
largest rate is best even so, the bound sets the size of the steps, and the gains hold for this bound.

Methods are compared by the area under the accuracy's curve, over equal generated decisions and over equal trained
decisions. Trained decisions are those of the prefix trees of prompts with right and wrong answers; other prompts teach
nothing. `--conditions` are parts of names of conditions. Writes studies/results/<name>.md and .png.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.report import interval, parser_of, table_lines, write_report
from recipe.latr.schedule import mix_ratio, tree_branches
from studies import RESULTS
from studies import tabular_trees as trees
from studies.tabular_learning import EXACT, LEARNT, LEARNT_TOGETHER, NOISE, NOISY, Curves, Method, learn, softmax
from studies.tabular_trees import ACTIONS, RIGHT, Drawing, Guide, N, Rows, Task

NAME = "where_trees_pay_simulation"
STEPS, RATES = 60, (1.0, 2.0, 4.0, 8.0, 16.0)
TUNING_SEEDS, TUNING_PROMPTS = 2, 20
LATR_SCHEDULE = {0.0: 1.0, 0.02: 0.75, 0.04: 0.5, 0.16: 0.25, 0.4: 0.0}  # the paper's, share of run -> of trees
FLAT, RIGHT_CONFIDENT, WRONG_CONFIDENT, WALK = "flat", "right-confident", "wrong-confident", "walk"


@dataclass(frozen=True)
class Condition:
    """A `Task`, the first policy and the verifier.

    `accuracy` is the first policy's share of right answers; a target determines it. `flipped` is the share of the
    verdicts that are wrong.
    """

    length: int
    accuracy: float
    shape: str
    flipped: float = 0.0
    target: int | None = None
    sees_errors: bool = False

    def __str__(self) -> str:
        name = f"{self.shape}, K {self.length}, {self.accuracy:g}"
        return name + (", sees errors" if self.sees_errors else "") + (", noisy" if self.flipped else "")

    @property
    def task(self) -> Task:
        return Task(self.length, self.target, self.sees_errors)

    @property
    def budget(self) -> float:
        """Return the number of decisions that a prompt may generate in a run."""
        return float(STEPS * N * self.length)


SHAPES = (FLAT, RIGHT_CONFIDENT, WRONG_CONFIDENT)
CONDITIONS = (
    *(Condition(k, a, shape) for shape in SHAPES for k in (3, 6, 12) for a in (0.3, 0.1, 0.01) if k == 6 or a < 0.3),
    *(Condition(6, a, FLAT, sees_errors=True) for a in (0.1, 0.01)),
    *(
        Condition(k, a, WALK, target=target)
        for k, a, target in ((3, 0.016, 9), (6, 0.082, 12), (6, 0.0051, 16), (12, 0.031, 24), (12, 0.0035, 28))
    ),
    *(Condition(6, a, shape, 0.1) for shape in SHAPES for a in (0.3, 0.1)),
)


def first_logits(condition: Condition, prompts: int, seed: int) -> np.ndarray:
    """Return the first policy's logits (P, K, seen states, A); hard decisions are drawn for each prompt.

    flat             every decision is right equally often, and the wrong actions are equally likely
    right-confident  decisions are right with 0.95, except for two hard ones, which are right equally often
    wrong-confident  decisions are right with 0.99, except for a hard one, where a wrong action is by far the most
                     likely; the other two wrong actions have 0.03 each, or in every other prompt 0.003
    walk             logits are normal with standard deviation 0.5; the policy sees the sum so far
    """
    length = condition.length
    if condition.shape == WALK:
        shape = prompts, length, condition.task.n_seen, ACTIONS
        return 0.5 * np.random.default_rng(seed).standard_normal(shape)
    hard, easy = {FLAT: (length, 1.0), RIGHT_CONFIDENT: (2, 0.95), WRONG_CONFIDENT: (1, 0.99)}[condition.shape]
    is_hard = np.random.default_rng(seed).random((prompts, length)).argsort(1) < hard
    right = np.where(is_hard, (condition.accuracy / easy ** (length - hard)) ** (1 / hard), easy)
    probs = np.repeat(((1 - right) / (ACTIONS - 1))[..., None], ACTIONS, -1)
    if condition.shape == WRONG_CONFIDENT:
        others = np.where(np.arange(prompts) % 2, 0.03, 0.003)
        probs[is_hard, RIGHT + 1 :] = others[:, None]
        probs[is_hard, RIGHT + 1] = 1 - 2 * others - right[is_hard]
    probs[..., RIGHT] = right
    return np.log(probs)[:, :, None].repeat(condition.task.n_seen, 2)


def latr(drawing: Drawing, guide: Guide | None, absolute: float, relative: float, schedule=LATR_SCHEDULE) -> Rows:
    """Draw a tree with the number of branches that the schedule has for this share of the run."""
    return trees.latr(drawing, absolute, relative, tree_branches(N, mix_ratio(schedule, drawing.done)))


VALUES = (EXACT, NOISY, LEARNT, LEARNT_TOGETHER)
GRPO_ALONE = ("grpo_vectorized",)
spread_levels = partial(trees.levels, ends=trees.spread)
METHODS = (
    Method("GRPO", trees.independent, GRPO_ALONE),
    Method("groups drawn again", trees.independent, GRPO_ALONE, rounds=10),
    Method("12 answers, paid as 8", partial(trees.independent, answers=12), GRPO_ALONE, counted=8 / 12),
    Method("1 greedy + 7", trees.greedy, GRPO_ALONE),
    Method("LATR, 0.25/0.15", partial(latr, absolute=0.25, relative=0.15)),
    Method("LATR, 0.05/1", partial(latr, absolute=0.05, relative=1.0)),
    Method("LATR, 0.05/1, to the end", partial(latr, absolute=0.05, relative=1.0, schedule={0.0: 1.0})),
    Method("LATR, 0.005/1, to the end", partial(latr, absolute=0.005, relative=1.0, schedule={0.0: 1.0})),
    Method("random forks", trees.random_forks),
    Method("entropy forks", trees.entropy_forks),
    Method("levels", spread_levels),
    Method("levels, exact", spread_levels, value=EXACT),
    *(Method(f"beam, {value}", trees.levels, value=value) for value in VALUES),
    *(Method(f"beam + dropped, {value}", trees.levels, value=value, trains_dropped=True) for value in VALUES),
    *(Method(f"half beam, {value}", trees.half_guided, value=value) for value in (EXACT, LEARNT)),
    *(Method(f"no tree, stopped, {value}", trees.stopped, value=value, trains_dropped=True) for value in VALUES),
)


def logits_of(condition: Condition, prompts: int, seeds: range) -> np.ndarray:
    """Return the first logits (seeds, prompts, K, seen states, A)."""
    return np.stack([first_logits(condition, prompts, seed) for seed in seeds])


def best_setting(condition: Condition, method: Method, largest_change: float) -> tuple[str, float]:
    """Return the credit and rate with the largest area under the curve, on seeds that are not reported."""
    first = logits_of(condition, TUNING_PROMPTS, range(1000, 1000 + TUNING_SEEDS))
    first, rates = np.tile(first, (len(RATES), 1, 1, 1, 1)), np.repeat(RATES, TUNING_SEEDS)
    areas = {}
    for credit in method.credits:
        curves = learn(condition.task, method, credit, rates, first, 1000, STEPS, condition.flipped, largest_change)
        areas_by_rate = curves.area("generated", np.full(len(rates), condition.budget)).reshape(len(RATES), -1).mean(1)
        areas |= {(credit, rate): area for rate, area in zip(RATES, areas_by_rate, strict=True)}
    return max(areas, key=lambda setting: areas[setting])


@dataclass
class Result:
    """The curves of one method under one condition, and the credit and learning rate that it used."""

    credit: str
    rate: float
    curves: Curves


def measured(condition: Condition, method: Method, seeds: int, prompts: int, largest_change: float) -> Result:
    """Train with the best setting on `seeds` seeds of `prompts` prompts each."""
    credit, rate = best_setting(condition, method, largest_change)
    first, rates = logits_of(condition, prompts, range(seeds)), np.full(seeds, rate)
    curves = learn(condition.task, method, credit, rates, first, 0, STEPS, condition.flipped, largest_change)
    return Result(credit, rate, curves)


def differences(condition: Condition, result: Result, baseline: Result, measure: str) -> np.ndarray:
    """Return the differences (seeds,) of `final` accuracy, or of area over equal `generated` or `trained` decisions."""
    ours, theirs = result.curves, baseline.curves
    end = np.full(ours.accuracy.shape[1], condition.budget)
    if measure == "trained":
        end = np.minimum(ours.trained[-1], theirs.trained[-1])
    return score(ours, measure, end) - score(theirs, measure, end)


def score(curves: Curves, measure: str, end: np.ndarray) -> np.ndarray:
    """Return the accuracy (sets,) after `end` decisions if measure is `final`, else the mean accuracy until then."""
    return curves.at("generated", end[:, None])[:, 0] if measure == "final" else curves.area(measure, end)


def start_of(condition: Condition, method: Method, prompts: int) -> tuple[float, float, float]:
    """Return, under the first policy, the mean number of answers of a prompt, the share of right ones, and the share of
    prompts that have right and wrong ones.
    """
    probs = softmax(first_logits(condition, prompts, 0))
    drawing = Drawing(condition.task, probs, np.random.default_rng(0))
    rows = method.grow(drawing, method.guide(drawing, None))
    complete = rows.lengths == condition.length
    right = condition.task.is_right(rows.states[..., -1]) & complete
    wrong = (rows.lengths > 0 if method.trains_dropped else complete) & ~right
    return complete.sum(1).mean(), right.sum() / complete.sum(), (right.any(1) & wrong.any(1)).mean()


Results = Mapping[Condition, Mapping[str, Result]]


def gain_table(results: Results, measure: str) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: a row for each condition, a column for each method."""
    rows = []
    for condition, by_method in results.items():
        baseline, *others = by_method.values()
        end = np.full(baseline.curves.accuracy.shape[1], condition.budget)
        own = score(baseline.curves, "final" if measure == "final" else "generated", end)
        cells = []
        for result in others:
            mean, half = interval(differences(condition, result, baseline, measure))
            cell = f"{mean:+.3f} ± {half:.3f}"
            cells.append(f"**{cell}**" if abs(mean) > half else cell)
        rows.append([str(condition), f"{own.mean():.3f}", *cells])
    return ["condition", *(method.name for method in METHODS)], rows


def settings_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: each condition's credit and learning rate for each method."""
    rows = [
        [str(condition), *(f"{x.credit.removesuffix('_vectorized')}, {x.rate:g}" for x in by_method.values())]
        for condition, by_method in results.items()
    ]
    return ["condition", *(method.name for method in METHODS)], rows


def start_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: `start_of` for each method under each condition without wrong verdicts.

    Left out are methods that draw groups again, count only a share of their decisions, or have an inexact value.
    """
    shown = [m for m in METHODS if m.value in (None, EXACT) and m.counted == 1 and m.rounds == 1]
    rows = []
    for condition in (condition for condition in results if not condition.flipped):
        cells = (start_of(condition, method, 4000) for method in shown)
        rows.append([str(condition), *(f"{n:.1f}, {right:.2f}, {mixed:.2f}" for n, right, mixed in cells)])
    return ["condition", *(method.name for method in shown)], rows


def section(title: str, header: list[str], rows: list[list[str]]) -> str:
    return "\n".join([f"## {title}", "", *table_lines(header, rows)])


def draw(results: Results, name: str) -> None:
    """Draw a cell for each condition and method; a cell whose interval contains 0 has no number."""
    figure = Figure(figsize=(17, 5 + 0.56 * len(results)), layout="constrained")
    conditions, methods = list(results), METHODS[1:]
    titles = {"generated": "at equal generated decisions", "trained": "at equal trained decisions of the prefix tree"}
    for axes, (measure, title) in zip(figure.subplots(2, 1), titles.items(), strict=True):
        cells = np.array(
            [
                [interval(differences(c, row[method.name], row[METHODS[0].name], measure)) for method in methods]
                for c, row in results.items()
            ]
        )
        image = axes.imshow(cells[..., 0], cmap="RdBu", vmin=-0.3, vmax=0.3, aspect="auto")
        for (row, column), (mean, half) in ((at, cells[at]) for at in np.ndindex(cells.shape[:2])):
            if abs(mean) > half:
                color = "white" if abs(mean) > 0.2 else "black"
                axes.text(column, row, f"{mean:+.2f}", ha="center", va="center", fontsize=8, color=color)
        axes.set_title(f"Area under the accuracy's curve, minus GRPO's, {title}", fontsize=13)
        axes.set_xticks(range(len(methods)), [m.name for m in methods], rotation=40, ha="left", fontsize=9)
        axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.set_yticks(range(len(conditions)), [str(c) for c in conditions], fontsize=9)
        for row in range(1, len(conditions)):
            before, after = conditions[row - 1], conditions[row]
            if (before.shape, before.flipped, before.sees_errors) != (after.shape, after.flipped, after.sees_errors):
                axes.axhline(row - 0.5, color="black", linewidth=1)
        figure.colorbar(image, ax=axes, shrink=0.5, pad=0.01)
    figure.savefig(RESULTS / f"{name}.png", dpi=75)


def text_of(results: Results, args: Namespace) -> str:
    """Return the page without its last table, whose heading is the last line."""
    n, rates = len(results) * (len(METHODS) - 1), ", ".join(f"{rate:g}" for rate in RATES)
    what = [
        f"Mean accuracy during training (the area under its curve) minus GRPO's: mean of {args.seeds} seeds of "
        f"{args.prompts} prompts ± half its 95 % interval (paired by seed, Student's t); bold where the interval "
        f"excludes 0. Of the {n} intervals of a table about {n // 20} exclude 0 by chance. The column GRPO is GRPO's "
        "own mean accuracy.",
        f"{STEPS} steps of {N} x K decisions for a prompt, {ACTIONS} actions; no update moves a logit by more than "
        f"{args.largest_change}. A condition is the first policy's shape, K, the share of right answers at first, and "
        "`noisy` where one verdict in ten is wrong; `walk` and `sees errors` have logits for each state, the others "
        "for each decision alone. Learning rates "
        f"({rates}) and, for trees, the credit (grpo or treerl) are tuned for each method and condition on "
        f"{TUNING_SEEDS} other seeds of {TUNING_PROMPTS} prompts. A noisy value has an error of standard deviation "
        f"{NOISE}, the best value being 1. Only prompts that have right and wrong answers are trained. "
        f"{time.process_time():.0f} CPU seconds.",
        f"![the first two tables as a picture]({args.name}.png)",
        section("Equal generated decisions", *gain_table(results, "generated")),
        section("Equal trained decisions, those of the prefix tree", *gain_table(results, "trained")),
        section("Accuracy at the end, after equal generated decisions", *gain_table(results, "final")),
        section("At the first policy: answers, share of right ones, share of mixed groups", *start_table(results)),
        "## Credit and learning rate",
    ]
    return "\n\n".join(what)


def main() -> None:
    parser = parser_of(__doc__, seeds=5, prompts=48, largest_change=0.25, conditions="", name=NAME)
    args = parser.parse_args()
    conditions = [each for each in CONDITIONS if any(part in str(each) for part in args.conditions.split(";"))]
    if not conditions:
        parser.error(f"--conditions={args.conditions}: none of {'; '.join(map(str, CONDITIONS))}")
    torch.set_num_threads(1)
    results: dict[Condition, dict[str, Result]] = {}
    for condition in conditions:
        results[condition] = {}
        for method in METHODS:
            results[condition][method.name] = measured(condition, method, args.seeds, args.prompts, args.largest_change)
        baseline = results[condition]["GRPO"]
        for name, result in results[condition].items():
            gain = differences(condition, result, baseline, "generated").mean()
            print(condition, name, f"{gain:+.3f}", sep=" | ", file=sys.stderr, flush=True)
    draw(results, args.name)
    write_report(args.name, text_of(results, args), *settings_table(results), RESULTS)


if __name__ == "__main__":
    main()
