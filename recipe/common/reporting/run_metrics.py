"""Reads and draws the training metrics of finished or running runs.

A run's metrics are the lines of verl's `file` logger, `{"step": 3, "data": {"actor/entropy": 1.2, ...}}`, in
`<run folder>/metrics.jsonl` (point VERL_FILE_LOGGER_PATH there). That logger empties its file when a run resumes, so
the launcher keeps earlier attempts as `metrics.001.jsonl`, ... `load_metrics` joins them in one table; `plot_runs`
draws several runs in one figure. `scripts/plot_run.py` is the command line.
"""

import json
import math
import re
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from verl.utils.atomic_files import replacing

METRICS_FILE = "metrics.jsonl"
EARLIER_ATTEMPTS = "metrics.[0-9]*.jsonl"
WARM_UP_STEPS = 2

# a panel's title -> metrics, of which a run's first one is drawn
CURVES = {
    "Training reward": ("critic/score/mean", "critic/rewards/mean"),
    "Entropy (nats)": ("actor/entropy",),
    "Response length (tokens)": ("response_length/mean",),
    "Clip fraction": ("actor/pg_clipfrac",),
    "Training loss (nats)": ("train/loss",),
    "Gradient norm": ("train/grad_norm",),
    "Learning rate": ("train/lr",),
}
VAL_ACCURACY = re.compile(r"val-core/(?P<dataset>.+)/acc/mean@(?P<n>\d+)")
# HATO's buffer counts generated prompts / trained prompts; upstream's buffer counts the dropped prompts
GENERATED_BATCHES = "training/filter_groups/gen_batches"
DROPPED_PROMPTS = tuple(f"training/filter_groups/{name}" for name in ("evicted_samples", "discarded_surplus_samples"))
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
PHASES += ("save_checkpoint", "testing")
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4"}


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


def curves_of(runs: dict[str, pd.DataFrame]) -> dict[str, dict[str, pd.Series]]:
    """Return title -> label -> curve for those of `CURVES` and data sets of the validation that any run has."""
    curves: dict[str, dict[str, pd.Series]] = {}
    for title, names in CURVES.items():
        for label, metrics in runs.items():
            recorded = [name for name in names if name in metrics and metrics[name].notna().any()]
            if recorded:
                curves.setdefault(title, {})[label] = metrics[recorded[0]].dropna()
    for label, metrics in runs.items():
        for dataset, accuracy in validation_accuracy(metrics).items():
            curves.setdefault(f"Validation accuracy: {dataset}", {})[label] = accuracy
    return curves


def plot_runs(runs: dict[str, pd.DataFrame], output: str | Path) -> Path:
    """Draw the runs (label -> table of `load_metrics`) in one figure, a color each; the suffix sets the format.

    There is a panel for each title of `curves_of`, and one for the time per phase. Returns `output`.
    """
    curves = curves_of(runs)
    phases = pd.DataFrame({label: phase_seconds(metrics) for label, metrics in runs.items()}, index=PHASES)
    n_panels = len(curves) + int(phases.notna().any(axis=None))
    if not n_panels:
        expected = ", ".join(name for names in CURVES.values() for name in names)
        raise ValueError(f"{', '.join(runs)}: nothing to draw; expected metrics like {expected}")
    output, columns = Path(output), min(3, n_panels)
    rows = math.ceil(n_panels / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7.5, 5 * columns), 4.1 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, (title, by_run) in zip(axes, curves.items(), strict=False):
            for number, label in enumerate(runs):
                if label in by_run:
                    by_run[label].plot(ax=ax, color=f"C{number}", marker=".", label=label)
            ax.set(title=title, xlabel="training step")
        if n_panels > len(curves):
            shown = phases.dropna(how="all").T
            shown.plot.barh(stacked=True, ax=axes[n_panels - 1], colormap="tab20", title="Time per phase")
            axes[n_panels - 1].set_xlabel("seconds per step (median after warm-up)")
            axes[n_panels - 1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
        for ax in axes[n_panels:]:
            ax.set_axis_off()
        handles = [Line2D([], [], color=f"C{number}", label=label) for number, label in enumerate(runs)]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
        with replacing(output) as temporary:
            figure.savefig(temporary, format=output.suffix.lstrip(".") or "png", dpi=130)
    return output
