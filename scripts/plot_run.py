"""Draws the training curves of one or several runs in a figure.

    python scripts/plot_run.py outputs/grpo outputs/hapo --labels GRPO,HAPO --output curves.png

A RUN is a run folder (with `metrics.jsonl`) or a metrics file as verl's `file` logger writes it. The figure shows
reward, validation accuracy, entropy, response length, clip fraction and time per phase.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from recipe.common.reporting.run_metrics import load_metrics, plot_runs, run_folder


def default_labels(runs: list[Path]) -> list[str]:
    """Return the names of the run folders. Runs with the same name also get the name of their parent folder."""
    folders = [run_folder(run) for run in runs]
    times = Counter(folder.name for folder in folders)
    return [folder.name if times[folder.name] == 1 else f"{folder.parent.name}/{folder.name}" for folder in folders]


def run_labels(runs: list[Path], names: str | None) -> list[str]:
    """Return a distinct label for each run: the comma-separated names, or by default those of `default_labels`."""
    labels = [label.strip() for label in names.split(",")] if names else default_labels(runs)
    if len(labels) != len(runs):
        raise ValueError(f"--labels has {len(labels)} labels ({names}) for {len(runs)} runs")
    if twice := [label for label, times in Counter(labels).items() if times > 1]:
        raise ValueError(f"the label {twice[0]!r} stands for several runs; tell them apart with --labels a,b,...")
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
