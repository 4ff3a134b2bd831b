"""Draws the training metrics of runs (see run_metrics.py) in one figure; `scripts/plot_run.py` is the command line."""

import math
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from recipe.common.reporting.run_metrics import PHASES, phase_seconds, validation_accuracy
from verl.utils.atomic_files import replacing

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
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4"}


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
