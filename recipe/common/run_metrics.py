"""Training metrics of finished or running runs: read them, draw them.

A run's metrics are the lines of verl's `file` logger, `{"step": 3, "data": {"actor/entropy": 1.2, ...}}`, in
`<run folder>/metrics.jsonl` (point VERL_FILE_LOGGER_PATH there). That logger empties its file when a run resumes, so
the launcher keeps earlier attempts as `metrics.001.jsonl`, ... `load_metrics` makes one table of them all;
`plot_runs` draws several runs in one figure. `scripts/plot_run.py` is the command line.
"""

import json
import math
import re
from collections.abc import Callable
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
ENTROPY, LENGTH, CLIP_FRACTION = "actor/entropy", "response_length/mean", "actor/pg_clipfrac"
CURVES = (*REWARD, ENTROPY, LENGTH, CLIP_FRACTION)
SFT_CURVES = ("train/loss", "train/grad_norm", "train/lr")
VAL_ACCURACY = re.compile(r"val-core/(?P<dataset>.+)/acc/mean@(?P<n>\d+)")
PHASE_COLORS = {
    "gen": "#4477aa",
    "reward": "#66ccee",
    "old_log_prob": "#228833",
    "ref": "#99cc66",
    "values": "#88ccaa",
    "adv": "#ccbb44",
    "update_critic": "#ee99aa",
    "update_actor": "#cc6677",
    "update_weights": "#aa3377",
    "save_checkpoint": "#777777",
    "testing": "#bbbbbb",
}
RUN_COLORS = ("#1f6fb4", "#e06c00", "#2a9d4a", "#c8323c", "#7d55b0", "#8a5a44", "#d264a8", "#6b6b6b")
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")

Runs = dict[str, pd.DataFrame]


def metrics_files(path: str | Path) -> list[Path]:
    """The metrics files of a run folder, oldest attempt first, or the file itself.

    Raises:
        FileNotFoundError: there is none.
    """
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
    """Where the run lives and what it is called: the folder, or `<experiment>` for a file `<experiment>.jsonl`."""
    path = Path(path).resolve()
    if path.is_dir():
        return path
    return path.parent if path.name == METRICS_FILE else path.with_suffix("")


def load_metrics(path: str | Path) -> pd.DataFrame:
    """One row per step (index `step`, ascending), one float column per metric; NaN where a step did not log it.

    When a step is logged again (a resumed run), each metric's last value wins. An attempt in a file of its own also
    replaces the steps beyond its first one: attempts 0..14 and 10..12 make the run 0..12. The half line that a
    killed run leaves behind is skipped. Text and lists are not metrics and are left out.

    Raises:
        FileNotFoundError: no such run.
        ValueError: a damaged line, or no complete one; the message names the file, the line and the key.
    """
    rows: dict[int, dict[str, float]] = {}
    for file in metrics_files(path):
        attempt = _read_attempt(file)
        if attempt:
            start = next(iter(attempt))
            rows = {step: row for step, row in rows.items() if step <= start}
        for step, row in attempt.items():
            rows.setdefault(step, {}).update(row)
    if not rows:
        raise ValueError(f'{path}: no metrics; expected lines like {{"step": 1, "data": {{"actor/entropy": 1.2}}}}')
    index = pd.Index(list(rows), name="step", dtype="int64")
    return pd.DataFrame(list(rows.values()), index=index, dtype="float64").sort_index()


def _read_attempt(file: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics, in the order in which the steps were first logged."""
    rows: dict[int, dict[str, float]] = {}
    numbered = enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    for number, line in lines:
        record = _parse_line(line)
        if record is not None:
            step, data = _check_record(record, where=f"{file}, line {number}")
            rows.setdefault(step, {}).update(_numbers(data))
        elif number < lines[-1][0]:
            raise ValueError(f"{file}, line {number}: not JSON: {line[:60]!r}")
    return rows


def _parse_line(line: str) -> object | None:
    """The line's record; None for half a line. A resumed run's first line may be glued to a killed run's half line."""
    for candidate in (line, line[max(line.rfind('{"step":'), 0) :]):
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            continue
    return None


def _check_record(record: object, where: str) -> tuple[int, dict]:
    if not isinstance(record, dict) or not {"step", "data"} <= record.keys():
        raise ValueError(f'{where}: expected the keys "step" and "data"')
    step, data = record["step"], record["data"]
    if type(step) is not int:
        raise ValueError(f'{where}: "step" must be an integer, got {step!r}')
    if not isinstance(data, dict):
        raise ValueError(f'{where}: "data" must be a mapping of metrics, got {type(data).__name__}')
    return step, data


def _numbers(data: dict) -> dict[str, float]:
    """NaN is `null` in verl's file."""
    values = {key: math.nan if value is None else value for key, value in data.items()}
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}


def first_recorded(metrics: pd.DataFrame, names: tuple[str, ...]) -> pd.Series:
    """The first of the named metrics that has a value, without its gaps; empty when there is none."""
    for name in names:
        if name in metrics and metrics[name].notna().any():
            return metrics[name].dropna()
    return pd.Series(dtype="float64")


def validation_accuracy(metrics: pd.DataFrame) -> dict[str, pd.Series]:
    """Data source -> mean accuracy over the validation steps.

    Where the number of samples per question changed on the way, a step keeps the mean over the most samples.
    """
    matches = sorted(
        (match for name in metrics if (match := VAL_ACCURACY.fullmatch(name))), key=lambda match: -int(match["n"])
    )
    curves: dict[str, pd.Series] = {}
    for match in matches:
        values = metrics[match[0]].dropna()
        if not values.empty:
            dataset = match["dataset"]
            curves[dataset] = curves[dataset].combine_first(values) if dataset in curves else values
    return dict(sorted(curves.items()))


def phase_seconds(metrics: pd.DataFrame) -> dict[str, float]:
    """Seconds per training step that each phase costs in the steady state.

    The first two timed steps (compilation, caches) are left out if there are more. A phase costs its median over
    the steps that ran it, times the share of steps that ran it: testing for 30 s every 10th step costs 3 s a step.
    """
    columns = [f"timing_s/{phase}" for phase in PHASE_COLORS if f"timing_s/{phase}" in metrics]
    timed = metrics[columns].dropna(how="all")
    steady = timed.iloc[WARM_UP_STEPS:] if len(timed) > WARM_UP_STEPS else timed
    ran = steady.notna()
    costs = (steady.median() * ran.mean())[ran.any()]
    return {name.removeprefix("timing_s/"): float(cost) for name, cost in costs.items()}


def smoothing_window(n_points: int) -> int:
    """Steps in the rolling mean: a fifteenth of the curve, 3 to 50; 1 (none) for short curves."""
    return 1 if n_points < 12 else min(max(n_points // 15, 3), 50)


def plot_runs(runs: Runs, output: str | Path) -> Path:
    """Draws the runs (label -> table of `load_metrics`) in one figure, a colour each; the suffix gives the format.

    RL runs get six panels; runs of the SFT trainer alone three (loss, gradient norm, learning rate). A panel whose
    metric no run has says "not recorded". Returns `output`.

    Raises:
        ValueError: no runs, or none of them has a metric of any panel.
    """
    if not runs:
        raise ValueError("plot_runs: no runs to draw")
    output = Path(output)
    panels = _PANELS
    if not any(_has_curves(metrics) for metrics in runs.values()):
        panels = _SFT_PANELS
    if panels is _SFT_PANELS and all(first_recorded(metrics, SFT_CURVES).empty for metrics in runs.values()):
        raise ValueError(f"{', '.join(runs)}: nothing to draw; expected metrics like {', '.join(CURVES)}")
    colors = run_colors(list(runs))
    with matplotlib.rc_context(STYLE):
        rows = len(panels) // 3
        figure = Figure(figsize=(15, 4.1 * rows), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12)
        axes = figure.subplots(rows, 3).flat
        for ax, (draw, title, unit) in zip(axes, panels, strict=True):
            ax.set_title(title)
            _finish_panel(ax, unit, runs, absent=draw(ax, runs, colors))
        handles = [Line2D([], [], color=color, linewidth=3, label=label) for label, color in colors.items()]
        legend_above(figure, handles, most_columns=5, fontsize=11)
        if any(smoothing_window(len(metrics)) > 1 for metrics in runs.values()):
            note = "faint: every step; solid: centred rolling mean over about 1/15 of the run"
            figure.supxlabel(note, fontsize=9, color="#666666")
        with replacing(output) as temporary:
            figure.savefig(temporary, format=output.suffix.lstrip(".") or "png", dpi=130)
    return output


def _has_curves(metrics: pd.DataFrame) -> bool:
    curve = first_recorded(metrics, CURVES)
    return not curve.empty or bool(validation_accuracy(metrics)) or bool(phase_seconds(metrics))


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


def legend_above(figure: Figure, handles: list[Artist], most_columns: int, fontsize: int) -> None:
    """The figure's legend, in as many columns as fit into its width."""
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
    """Axis labels, the same steps on every panel, and a note on the runs that lack the metric."""
    if len(absent) == len(runs):
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", color="#999999", size=14)
        ax.set(xticks=[], yticks=[])
        return
    if unit:
        first, last = (pick(pick(metrics.index) for metrics in runs.values()) for pick in (min, max))
        margin = 0.03 * (last - first) or 0.5
        ax.set(xlabel="training step", ylabel=unit, xlim=(first - margin, last + margin))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    if absent:
        note = "not recorded: " + ", ".join(absent)
        ax.text(1, 1.01, note, transform=ax.transAxes, ha="right", va="bottom", color="#888888", size=8.5)


def _training_curve(*names: str) -> Callable[[Axes, Runs, dict], list[str]]:
    """A panel that draws the first recorded of the metrics for each run and returns the runs without one."""

    def draw(ax: Axes, runs: Runs, colors: dict) -> list[str]:
        absent = []
        for label, metrics in runs.items():
            values = first_recorded(metrics, names)
            if values.empty:
                absent.append(label)
            else:
                _draw_smoothed(ax, values, colors[label])
        return absent

    return draw


def _draw_smoothed(ax: Axes, values: pd.Series, color: object) -> None:
    window = smoothing_window(len(values))
    if window == 1:
        ax.plot(values.index, values, color=color, linewidth=1.8, marker="o", markersize=3.5)
        return
    ax.plot(values.index, values, color=color, linewidth=0.9, alpha=0.25)
    ax.plot(values.index, values.rolling(window, center=True, min_periods=1).mean(), color=color, linewidth=2)


def _draw_validation(ax: Axes, runs: Runs, colors: dict) -> list[str]:
    curves = {label: validation_accuracy(metrics) for label, metrics in runs.items()}
    datasets = sorted({dataset for of_run in curves.values() for dataset in of_run})
    for label, of_run in curves.items():
        for dataset, values in of_run.items():
            style, marker = _dataset_style(datasets.index(dataset))
            ax.plot(values.index, values, color=colors[label], linestyle=style, marker=marker, markersize=4.5)
    if datasets:
        styles = [_dataset_style(i) for i in range(len(datasets))]
        keys = [
            Line2D([], [], color="#444444", linestyle=style, marker=marker, markersize=4.5, label=dataset)
            for dataset, (style, marker) in zip(datasets, styles, strict=True)
        ]
        ax.legend(handles=keys, fontsize=9, loc="best", handlelength=3)
    return [label for label, of_run in curves.items() if not of_run]


def _dataset_style(i: int) -> tuple[str, str]:
    """A line style and a marker; 16 pairs before they repeat."""
    return LINE_STYLES[i % len(LINE_STYLES)], MARKERS[(i + i // len(LINE_STYLES)) % len(MARKERS)]


def _draw_phases(ax: Axes, runs: Runs, colors: dict) -> list[str]:
    """One stacked bar per run, its total at its end, its name above it (many runs: its colour beside it)."""
    costs = {label: phase_seconds(metrics) for label, metrics in runs.items()}
    shown = {label: of_run for label, of_run in costs.items() if of_run}
    for row, (label, of_run) in enumerate(shown.items()):
        left = 0.0
        for phase, seconds in of_run.items():
            ax.barh(row, seconds, left=left, height=0.5, color=PHASE_COLORS[phase], edgecolor="white", linewidth=0.6)
            left += seconds
        crowded = len(shown) > 5
        ax.annotate(f" {left:.3g} s", (left, row), va="center", fontweight="bold", size=8 if crowded else 10)
        if crowded:
            beside = {"transform": ax.get_yaxis_transform(), "clip_on": False}
            ax.plot([-0.02], [row], marker="s", markersize=7, color=colors[label], **beside)
        else:
            ax.annotate(label, (0, row - 0.3), va="bottom", color=colors[label], size=9.5)
    if shown:
        _finish_phases(ax, shown)
    return [label for label, of_run in costs.items() if not of_run]


def _finish_phases(ax: Axes, shown: dict[str, dict[str, float]]) -> None:
    used = [phase for phase in PHASE_COLORS if any(phase in of_run for of_run in shown.values())]
    keys = [Line2D([], [], color=PHASE_COLORS[phase], linewidth=7, label=phase) for phase in used]
    ax.legend(handles=keys, loc="lower center", ncols=3, fontsize=9, handlelength=0.8, columnspacing=1.2)
    rows = max(len(shown), 2)
    room_for_legend = 0.45 * rows
    ax.set(xlabel="seconds per step (median after warm-up)", yticks=[], ylim=(rows - 0.5 + room_for_legend, -0.7))
    ax.margins(x=0.14)
    ax.grid(visible=False)


_PANELS = (
    (_training_curve(*REWARD), "Training reward", "mean reward per response"),
    (_draw_validation, "Validation accuracy", "accuracy (mean over samples)"),
    (_training_curve(ENTROPY), "Entropy", "entropy (nats per token)"),
    (_training_curve(LENGTH), "Response length", "mean length (tokens)"),
    (_training_curve(CLIP_FRACTION), "Clip fraction", "share of tokens clipped"),
    (_draw_phases, "Time per phase", ""),
)

_SFT_PANELS = (
    (_training_curve("train/loss"), "Training loss", "cross-entropy (nats per token)"),
    (_training_curve("train/grad_norm"), "Gradient norm", "L2 norm"),
    (_training_curve("train/lr"), "Learning rate", "learning rate"),
)
