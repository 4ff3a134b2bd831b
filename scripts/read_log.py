"""Collects evaluation logs and training logs in a CSV, with a row per experiment and step, and compares experiments.

    python scripts/read_log.py outputs/results/*/*/*.log outputs/hapo --output metrics.csv

Beside the CSV it writes a table in Markdown, metrics.md, and a bar chart, metrics.png, of every experiment at its last
step, with the evaluations' bootstrap intervals.

Evaluation logs hold the `RESULT {json}` lines of `verl.evaluation.scores.results`. Training logs are run folders or
`.jsonl` files of verl's `file` logger, of which the validation metrics are used. Their Best@n and Maj@n are verl's
bootstrap estimates (n draws with replacement), not exact values as in an evaluation log. The columns are experiment,
step, then `<dataset>-Acc-Pass@1`, `<dataset>-Acc-Mean@8`, `<dataset>-Response-Length-Mean`, ...
"""

import argparse
import re
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from recipe.common.reporting.comparison import Results, markdown, plot_comparison
from recipe.common.reporting.run_metrics import load_metrics, run_folder
from verl.evaluation.scores.results import INTERVAL_ENDS, parse_result_lines
from verl.utils.atomic_files import replacing

VAL_ACCURACY = re.compile(r"val-core/(?P<dataset>.+)/acc/(?P<kind>mean|(best|maj)(?=@\d+/mean))@(?P<n>\d+)(/mean)?")
VAL_LENGTH = re.compile(r"val-aux/(?P<dataset>.+)/response_length/mean@(?P<n>\d+)")
METRIC_ORDER = ("Acc-Pass", "Acc-Mean", "Acc-Best", "Acc-Maj", "Response-Length")


class Cell(NamedTuple):
    """One number of the table, such as metric Acc-Mean@8 of dataset aime24, and the log that it came from."""

    experiment: str
    step: int | None
    dataset: str
    metric: str
    value: float
    log: Path


def read_log(path: Path) -> list[Cell]:
    """Return all results of a log: a run folder or its train.log, a `.jsonl` file, or else an evaluation log."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such log")
    if path.name == "train.log":  # The run's metrics lie beside its printed log.
        path = path.parent
    is_training = path.is_dir() or path.suffix == ".jsonl"
    return _training_cells(path) if is_training else _evaluation_cells(path)


def _evaluation_cells(path: Path) -> list[Cell]:
    text = path.read_text(encoding="utf-8", errors="replace")
    results = parse_result_lines(text.split("\n"), source=str(path))
    if not results:
        raise ValueError(f"{path}: no lines like RESULT {{json}}; a training log is a run folder or a .jsonl file")
    return [
        Cell(result.experiment, result.step, result.dataset, metric, value, path)
        for result in results
        for metric, value in result.numbers.items()
    ]


def _training_cells(path: Path) -> list[Cell]:
    """Return the cells of a training log. The experiment is named after the run folder or the `.jsonl` file."""
    experiment = run_folder(path).name
    cells = []
    for step, row in load_metrics(path).iterrows():
        results = validation_results(row.dropna().to_dict())
        cells += [Cell(experiment, int(step), *key, value, path) for key, value in results.items()]
    if not any(cell.metric.startswith("Acc-") for cell in cells):
        raise ValueError(
            f"{path}: no validation accuracy; expected metrics like val-core/<dataset>/acc/mean@8 "
            "(is trainer.test_freq positive, and does the reward function return acc?)"
        )
    return cells


def validation_results(metrics: dict[str, float]) -> dict[tuple[str, str], float]:
    """Return verl's validation metrics of one step as a dictionary (dataset, metric) -> value.

    `val-core/countdown/acc/mean@8` becomes both Acc-Mean@8 and Acc-Pass@1 (the chance that a sample is right).
    `val-aux/countdown/response_length/mean@8`, which exists if the reward function returns `response_length`, becomes
    Response-Length-Mean. If there are several such metrics, the one with the most samples is used.
    """
    results: dict[tuple[str, str], float] = {}
    most_samples: dict[str, int] = {}
    for name, value in metrics.items():
        if match := VAL_ACCURACY.fullmatch(name):
            results[match["dataset"], f"Acc-{match['kind'].capitalize()}@{match['n']}"] = value
            if match["kind"] == "mean":
                results[match["dataset"], "Acc-Pass@1"] = value
        elif (match := VAL_LENGTH.fullmatch(name)) and int(match["n"]) > most_samples.get(match["dataset"], 0):
            most_samples[match["dataset"]] = int(match["n"])
            results[match["dataset"], "Response-Length-Mean"] = value
    return results


def make_table(cells: list[Cell]) -> tuple[list[str], list[dict], list[str]]:
    """Return column names, rows and warnings; of two logs that disagree on a cell, the later wins. Experiments are in
    the order of their logs, each with ascending steps."""
    rows: dict[tuple, dict] = {}
    sources: dict[tuple, Cell] = {}
    warnings = []
    for cell in cells:
        earlier = sources.get(cell[:4])
        if earlier and earlier.value != cell.value:
            where = f"{cell.experiment}, step {cell.step}, {cell.dataset}-{cell.metric}"
            warnings.append(f"{where}: {cell.value} ({cell.log}) replaces {earlier.value} ({earlier.log})")
        sources[cell[:4]] = cell
        row = rows.setdefault(cell[:2], {"experiment": cell.experiment, "step": cell.step})
        row[f"{cell.dataset}-{cell.metric}"] = cell.value
    experiments = list(dict.fromkeys(cell.experiment for cell in cells))
    ordered = sorted(rows.values(), key=lambda row: (experiments.index(row["experiment"]), _position_of(row["step"])))
    columns = [f"{dataset}-{metric}" for dataset, metric in _ordered_metrics(cells)]
    return ["experiment", "step", *columns], ordered, warnings


def _position_of(step: int | None) -> int:
    """Return the step as a sort key. Results without a step come before all steps."""
    return -1 if step is None else step


def _ordered_metrics(cells: list[Cell]) -> list[tuple[str, str]]:
    """Return pairs (dataset, metric): datasets in the order of the logs, metrics in `METRIC_ORDER`, then by name."""
    datasets = list(dict.fromkeys(cell.dataset for cell in cells))

    def position(column: tuple[str, str]) -> tuple:
        dataset, metric = column
        kind, _, n = metric.partition("@")
        rank = next((i for i, prefix in enumerate(METRIC_ORDER) if kind.startswith(prefix)), len(METRIC_ORDER))
        return datasets.index(dataset), rank, kind, int(n) if n.isdecimal() else 0, n

    return sorted({(cell.dataset, cell.metric) for cell in cells}, key=position)


def at_the_last_step(cells: list[Cell]) -> Results:
    """Return experiment -> data set -> metric -> value, at the last step that measured the data set's accuracy, which
    the label names if there are several. The ends of a value's confidence interval come from the same log as the value.
    """
    last: dict[tuple[str, str], int] = {}
    for cell in cells:
        if cell.metric.startswith("Acc-"):
            key = (cell.experiment, cell.dataset)
            last[key] = max(last.get(key, -1), _position_of(cell.step))
    n_steps = {name: len({cell.step for cell in cells if cell.experiment == name}) for name, _ in last}
    last_cells = {}  # a later log wins, as in the CSV
    for cell in cells:
        if last.get((cell.experiment, cell.dataset)) == _position_of(cell.step):
            last_cells[cell.experiment, cell.dataset, cell.metric] = cell
    results: Results = {}
    experiments = dict.fromkeys(cell.experiment for cell in cells)
    for experiment, (dataset, metric) in product(experiments, _ordered_metrics(cells)):
        last_cell = last_cells.get((experiment, dataset, metric))
        end = next((end for end in INTERVAL_ENDS if metric.endswith(end)), "")
        value = last_cells.get((experiment, dataset, metric.removesuffix(end)))
        if last_cell is None or value is None or last_cell.log != value.log:
            continue
        many = n_steps[experiment] > 1 and last_cell.step is not None
        label = f"{experiment} (step {last_cell.step})" if many else experiment
        results.setdefault(label, {}).setdefault(dataset, {})[metric] = last_cell.value
    return results


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", metavar="LOG", nargs="+", type=Path, help="evaluation log, run folder or .jsonl file")
    parser.add_argument("--output", type=Path, default=Path("metrics.csv"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.output.suffix in (".md", ".png"):
        parser.error(f"--output {options.output}: the CSV; a table (.md) and a chart (.png) are written beside it")
    try:
        # The shell passes a pattern on unchanged if no file matches it: such an argument is no log.
        cells = [cell for log in options.logs if "*" not in log.name or log.exists() for cell in read_log(log)]
        if not cells:
            raise FileNotFoundError(f"{' '.join(map(str, options.logs))}: no such logs")
        columns, rows, warnings = make_table(cells)
        with replacing(options.output) as unfinished:
            pd.DataFrame(rows, columns=columns, dtype=object).to_csv(unfinished, index=False, lineterminator="\n")
        written = [options.output]
        if results := at_the_last_step(cells):
            written.append(options.output.with_suffix(".md"))
            with replacing(written[-1]) as unfinished:
                unfinished.write_text(markdown(results), encoding="utf-8")
            written.append(plot_comparison(results, options.output.with_suffix(".png")))
    except (OSError, ValueError) as error:
        sys.exit(f"read_log: {error}")
    for warning in warnings:
        print(f"read_log: {warning}", file=sys.stderr)
    print(*written, sep="\n")


if __name__ == "__main__":
    main()
