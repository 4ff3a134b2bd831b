"""Reads and draws the training metrics of finished or running runs.

A run's metrics are the lines of verl's `file` logger, `{"step": 3, "data": {"actor/entropy": 1.2, ...}}`, in
`<run folder>/metrics.jsonl` (point VERL_FILE_LOGGER_PATH there). That logger empties its file when a run resumes, so
the launcher keeps earlier attempts as `metrics.001.jsonl`, ... `load_metrics` joins them in one table; `plot_runs`
draws several runs in one figure. `scripts/plot_run.py` is the command line.
"""

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from verl.utils.atomic_files import replacing

METRICS_FILE = "metrics.jsonl"
EARLIER_ATTEMPTS = "metrics.[0-9]*.jsonl"
WARM_UP_STEPS = 2

REWARD = ("critic/score/mean", "critic/rewards/mean")
CURVES = (*REWARD, "actor/entropy", "response_length/mean", "actor/pg_clipfrac")
VAL_ACCURACY = re.compile(r"val-core/(?P<dataset>.+)/acc/mean@(?P<n>\d+)")
# HATO's buffer counts generated prompts / trained prompts; upstream's buffer counts the dropped prompts
GENERATED_BATCHES = "training/filter_groups/gen_batches"
DROPPED_PROMPTS = tuple(f"training/filter_groups/{name}" for name in ("evicted_samples", "discarded_surplus_samples"))
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
PHASES += ("save_checkpoint", "testing")
PHASE_COLORS = dict(zip(PHASES, matplotlib.colormaps["Paired"].colors, strict=False))
RUN_COLORS = ("#1f6fb4", "#e06c00", "#2a9d4a", "#c8323c", "#7d55b0", "#8a5a44", "#d264a8", "#6b6b6b")
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")

Runs = dict[str, pd.DataFrame]


def metrics_files(path: str | Path) -> list[Path]:
    """Return the metrics files of a run folder, oldest attempt first, or the file itself if `path` is a file."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such run folder or metrics file")
    if path.is_file():
        return [path]
    earlier = sorted(path.glob(EARLIER_ATTEMPTS), key=lambda file: (len(file.name), file.name))
    files = [file for file in [*earlier, path / METRICS_FILE] if file.is_file()]
    if not files:
        raise FileNotFoundError(f"{path}: expected {METRICS_FILE} in this folder; set VERL_FILE_LOGGER_PATH to make it")
    return files


def run_folder(path: str | Path) -> Path:
    """Return the run's folder, whose name is the run's name. It is `path` itself if that is a folder, `<run>` for
    `<run>/metrics.jsonl`, and `<run>` beside `<run>.jsonl`."""
    path = Path(path).resolve()
    if path.is_dir():
        return path
    return path.parent if path.name == METRICS_FILE else path.with_suffix("")


def load_metrics(path: str | Path) -> pd.DataFrame:
    """Return a row per step (index `step`, ascending) and a float column per metric; NaN if a step did not log it.

    When a step is logged again (a resumed run), each metric's last value wins. An attempt in a file of its own also
    replaces all later steps of earlier attempts: attempts 0..14 and 10..12 make the run 0..12. An incomplete last
    line, which a killed run leaves behind, is skipped. Text and lists are not metrics and are left out.
    """
    rows: dict[int, dict[str, float]] = {}
    for file in metrics_files(path):
        attempt = _read_attempt(file)
        start = next(iter(attempt), math.inf)
        rows = {step: row for step, row in rows.items() if step <= start}
        for step, row in attempt.items():
            rows.setdefault(step, {}).update(row)
    if not rows:
        raise ValueError(f'{path}: no metrics; expected lines like {{"step": 1, "data": {{"actor/entropy": 1.2}}}}')
    index = pd.Index(list(rows), name="step", dtype="int64")
    return pd.DataFrame(list(rows.values()), index=index, dtype="float64").sort_index()


def _read_attempt(file: Path) -> dict[int, dict[str, float]]:
    """Return step -> metrics, ordered by when each step was first logged. NaN is `null` in verl's file."""
    rows: dict[int, dict[str, float]] = {}
    lines = file.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{file}, line {number}: not JSON: {line[:60]!r}") from error
        match record:
            case {"step": int(step), "data": dict(data)}:
                numbers = {key: value for key, value in data.items() if isinstance(value, int | float | None)}
                rows.setdefault(step, {}).update(numbers)
            case _:
                raise ValueError(f"{file}, line {number}: expected an integer step and a mapping data: {line[:60]!r}")
    return rows


def validation_accuracy(metrics: pd.DataFrame) -> dict[str, pd.Series]:
    """Return data source -> curve of the mean accuracy at the validation steps. A step with means over several numbers
    of samples per question keeps the mean over the most samples."""
    matches = filter(None, map(VAL_ACCURACY.fullmatch, metrics))
    curves: dict[str, pd.Series] = {}
    for match in sorted(matches, key=lambda match: -int(match["n"])):
        values = metrics[match[0]].dropna()
        if not values.empty:
            curves[match["dataset"]] = curves.get(match["dataset"], values).combine_first(values)
    return dict(sorted(curves.items()))


def phase_seconds(metrics: pd.DataFrame) -> dict[str, float]:
    """Return the seconds per training step that each phase costs in the steady state.

    The first two timed steps (compilation, caches) are left out if there are more. A phase costs its median over
    the steps that ran it, times the share of steps that ran it: testing for 30 s every 10th step costs 3 s a step.
    """
    columns = [f"timing_s/{phase}" for phase in PHASES if f"timing_s/{phase}" in metrics]
    timed = metrics[columns].dropna(how="all")
    steady = timed.iloc[WARM_UP_STEPS:] if len(timed) > WARM_UP_STEPS else timed
    ran = steady.notna()
    costs = (steady.median() * ran.mean())[ran.any()]
    return {name.removeprefix("timing_s/"): float(cost) for name, cost in costs.items()}


def generated_tokens(metrics: pd.DataFrame) -> pd.Series:
    """Return the number of tokens that the server generated in each step, including those of dropped prompts."""
    generated = metrics["tree/tokens_generated"] * metrics["tree/prompts"]
    if "hato/trees_dropped" in metrics:  # HATO's metric already counts them
        return generated
    if GENERATED_BATCHES in metrics:
        return generated * metrics[GENERATED_BATCHES]
    dropped = sum(metrics[name].fillna(0) for name in DROPPED_PROMPTS if name in metrics)
    return generated * (1 + dropped / metrics["tree/prompts"])


def smoothing_window(n_points: int) -> int:
    """Return the number of steps in the rolling mean: a fifteenth of the curve, 3 to 50; 1 (none) for short curves."""
    return 1 if n_points < 12 else min(max(n_points // 15, 3), 50)


def plot_runs(runs: Runs, output: str | Path) -> Path:
    """Draw the runs (label -> table of `load_metrics`) in one figure, a color each; the suffix sets the format.

    There is a panel for each metric of `_PANELS` that any run has; a note beside its title names the runs that lack it.
    Returns `output`.
    """
    output, colors = Path(output), run_colors(list(runs))
    panels = []
    for read, draw, title, unit in _PANELS:
        if data := {label: values for label, metrics in runs.items() if len(values := read(metrics))}:
            panels.append((data, draw, title, unit))
    if not panels:
        raise ValueError(f"{', '.join(runs)}: nothing to draw; expected metrics like {', '.join(CURVES)}")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7.5, 5 * columns), 4.1 * rows), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, (data, draw, title, unit) in zip(axes, panels, strict=False):
            ax.set_title(title)
            draw(ax, data, colors)
            _finish_panel(ax, unit, runs, [label for label in runs if label not in data])
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        handles = [Line2D([], [], color=color, linewidth=3, label=label) for label, color in colors.items()]
        legend_above(figure, handles, most_columns=5, fontsize=11)
        if any(smoothing_window(len(metrics)) > 1 for metrics in runs.values()):
            note = "faint: every step; solid: centered rolling mean over about 1/15 of the run"
            figure.supxlabel(note, fontsize=9, color="#666666")
        with replacing(output) as temporary:
            figure.savefig(temporary, format=output.suffix.lstrip(".") or "png", dpi=130)
    return output


STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "axes.edgecolor": "#888888",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10.5,
    "legend.frameon": False,
}


def legend_above(figure: Figure, handles: Sequence[Artist], most_columns: int, fontsize: int) -> None:
    """Draw the figure's legend in the largest number of columns that fits into its width."""
    for columns in range(min(len(handles), most_columns), 0, -1):
        legend = figure.legend(handles=handles, loc="outside upper center", ncols=columns, fontsize=fontsize)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def run_colors(labels: list[str]) -> dict[str, object]:
    if len(labels) <= len(RUN_COLORS):
        return dict(zip(labels, RUN_COLORS, strict=False))
    ramp = matplotlib.colormaps["turbo"]
    return {label: ramp(0.05 + 0.9 * i / (len(labels) - 1)) for i, label in enumerate(labels)}


def _finish_panel(ax: Axes, unit: str, runs: Runs, absent: list[str]) -> None:
    """Add axis labels, the same range of steps to every panel, and a note on the runs that lack the metric."""
    if unit:
        first, last = (pick(pick(metrics.index) for metrics in runs.values()) for pick in (min, max))
        margin = 0.03 * (last - first) or 0.5
        ax.set(xlabel="training step", ylabel=unit, xlim=(first - margin, last + margin))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    if absent:
        note = "not recorded: " + ", ".join(absent)
        ax.text(1, 1.01, note, transform=ax.transAxes, ha="right", va="bottom", color="#888888", size=8.5)


def first_recorded(names: tuple[str, ...], metrics: pd.DataFrame) -> pd.Series:
    """Return the curve of the first of these metrics that the run recorded; an empty one if it recorded none."""
    curves = (metrics[name].dropna() for name in names if name in metrics)
    return next((values for values in curves if not values.empty), pd.Series(dtype="float64"))


def _draw_training(ax: Axes, curves: dict[str, pd.Series], colors: dict) -> None:
    for label, values in curves.items():
        if (window := smoothing_window(len(values))) == 1:
            ax.plot(values.index, values, color=colors[label], linewidth=1.8, marker="o", markersize=3.5)
        else:
            mean = values.rolling(window, center=True, min_periods=1).mean()
            ax.plot(values.index, values, color=colors[label], linewidth=0.9, alpha=0.25)
            ax.plot(values.index, mean, color=colors[label], linewidth=2)


def _draw_validation(ax: Axes, curves: dict[str, dict[str, pd.Series]], colors: dict) -> None:
    """Draw each data set with its own line style and marker (16 pairs)."""
    keys = []
    for i, dataset in enumerate(sorted({dataset for run_curves in curves.values() for dataset in run_curves})):
        style = {"linestyle": LINE_STYLES[i % 4], "marker": MARKERS[(i + i // 4) % 4], "markersize": 4.5}
        keys.append(Line2D([], [], color="#444444", label=dataset, **style))
        for label, run_curves in curves.items():
            if dataset in run_curves:
                ax.plot(run_curves[dataset].index, run_curves[dataset], color=colors[label], **style)
    ax.legend(handles=keys, fontsize=9, loc="best", handlelength=3)


def _draw_phases(ax: Axes, seconds_by_run: dict[str, dict[str, float]], colors: dict) -> None:
    """Draw a stacked bar per run with its total at the end and its name beside it."""
    shown = pd.DataFrame(seconds_by_run, index=PHASES).dropna(axis=0, how="all").T
    ends = shown.cumsum(axis=1).ffill(axis=1)
    for phase, seconds in shown.items():
        left = ends[phase] - seconds
        ax.barh(range(len(shown)), seconds, 0.5, left, color=PHASE_COLORS[phase], edgecolor="white", label=phase)
    for row, total in enumerate(ends.iloc[:, -1]):
        ax.annotate(f" {total:.3g} s", (total, row), va="center", fontweight="bold", size=9)
    ax.legend(loc="lower center", ncols=3, fontsize=9, handlelength=0.8, columnspacing=1.2)
    rows = max(len(shown), 2)
    ax.set(xlabel="seconds per step (median after warm-up)", ylim=(1.45 * rows - 0.5, -0.7))
    ax.set_yticks(range(len(shown)), shown.index, fontsize=8)
    for name, label in zip(ax.get_yticklabels(), shown.index, strict=True):
        name.set_color(colors[label])
    ax.margins(x=0.14)
    ax.grid(visible=False)


# how a run's data is read and drawn, the panel's title, and the unit of its curves
_PANELS = (
    (partial(first_recorded, REWARD), _draw_training, "Training reward", "mean reward per response"),
    (validation_accuracy, _draw_validation, "Validation accuracy", "accuracy (mean over samples)"),
    (partial(first_recorded, ("actor/entropy",)), _draw_training, "Entropy", "entropy (nats per token)"),
    (partial(first_recorded, ("response_length/mean",)), _draw_training, "Response length", "mean length (tokens)"),
    (partial(first_recorded, ("actor/pg_clipfrac",)), _draw_training, "Clip fraction", "share of tokens clipped"),
    (phase_seconds, _draw_phases, "Time per phase", ""),
    (partial(first_recorded, ("train/loss",)), _draw_training, "Training loss", "cross-entropy (nats per token)"),
    (partial(first_recorded, ("train/grad_norm",)), _draw_training, "Gradient norm", "L2 norm"),
    (partial(first_recorded, ("train/lr",)), _draw_training, "Learning rate", "learning rate"),
)
