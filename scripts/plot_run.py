"""Draws the training curves of one or several runs in a figure.

    python scripts/plot_run.py outputs/grpo outputs/hapo --labels GRPO,HAPO --output curves.png

A RUN is a run folder (with `metrics.jsonl`) or a metrics file as verl's `file` logger writes it. The figure shows
reward, validation accuracy, entropy, response length, clip fraction and time per phase.
"""

import argparse
import sys
from pathlib import Path

from recipe.common.reporting.run_curves import plot_runs
from recipe.common.reporting.run_metrics import load_metrics


def run_labels(runs: list[Path], names: str | None) -> list[str]:
    """Return a distinct label for each run: the comma-separated names, or by default the names of the run folders."""
    folders = [run.resolve() if run.is_dir() else run.resolve().parent for run in runs]
    labels = [label.strip() for label in names.split(",")] if names else [folder.name for folder in folders]
    if len(set(labels)) != len(runs):
        raise ValueError(f"{len(runs)} runs have the labels {', '.join(labels)}: give each its own by --labels a,b,...")
    return labels


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder or metrics file")
    parser.add_argument("--output", type=Path, help="picture to write; default: curves.png in the first run's folder")
    parser.add_argument("--labels", help="comma-separated names for the legend, one per RUN")
    options = parser.parse_args(arguments)
    try:
        labels = run_labels(options.runs, options.labels)
        runs = {label: load_metrics(run) for label, run in zip(labels, options.runs, strict=True)}
        first = options.runs[0]
        output = plot_runs(runs, options.output or (first if first.is_dir() else first.parent) / "curves.png")
    except (OSError, ValueError) as error:
        sys.exit(f"plot_run: {error}")
    print(output)


if __name__ == "__main__":
    main()
