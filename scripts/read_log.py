"""Collects evaluation logs in a CSV, with a row per experiment and step, and in a Markdown table beside it.

    python scripts/read_log.py outputs/results/*/*.log outputs/results/*/*/*.log --output metrics.csv

The logs hold the `RESULT {json}` lines of `verl.evaluation.scores.results`; of several results of one experiment, step
and data set the last one counts. The columns of the CSV are experiment, step, then `<dataset>-Acc-Pass@1`,
`<dataset>-Acc-Mean@8`, `<dataset>-Response-Length-Mean`, ...; metrics.md has Pass@1 with its bootstrap interval, the
number of questions and the share of cut responses.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from verl.evaluation.scores.results import EvalResult, pass_at_1, read_result_log
from verl.utils.atomic_files import replacing


def make_table(results: Sequence[EvalResult]) -> pd.DataFrame:
    """Return the metrics: a row for each (experiment, step), a column for each (dataset, metric). A model that was not
    trained here has step -1."""
    cells = [
        (result.experiment, -1 if result.step is None else result.step, result.dataset, metric, float(value))
        for result in results
        for metric, value in result.numbers.items()
    ]
    table = pd.DataFrame(cells, columns=["experiment", "step", "dataset", "metric", "value"])
    return table.pivot_table(
        index=["experiment", "step"], columns=["dataset", "metric"], values="value", aggfunc="last"
    )


def markdown(table: pd.DataFrame) -> str:
    """Return a Markdown table for each data set."""
    return "\n".join(line for dataset in table.columns.unique("dataset") for line in _section(dataset, table[dataset]))


def _section(dataset: str, metrics: pd.DataFrame) -> Iterator[str]:
    yield from (f"## {dataset}", "", "| experiment | step | Pass@1 (95 % interval) | questions | cut responses |")
    yield "|---|---|---|---|---|"
    for (experiment, step), row in metrics.dropna(how="all").iterrows():
        values = row.dropna().to_dict()
        cut = f"{values['Cut-Share']:.1%}" if "Cut-Share" in values else ""
        cells = [experiment, "" if step < 0 else str(step), pass_at_1(values), f"{values['Questions']:.0f}", cut]
        yield f"| {' | '.join(cells)} |"
    yield ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", metavar="LOG", nargs="+", type=Path, help="log of an evaluation")
    parser.add_argument("--output", type=Path, default=Path("metrics.csv"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.output.suffix == ".md":
        parser.error(f"--output {options.output}: the CSV; a Markdown table is written beside it")
    try:
        # The shell passes a pattern on unchanged if no file matches it: such an argument is no log.
        results = [
            result for log in options.logs if "*" not in log.name or log.exists() for result in read_result_log(log)
        ]
        if not results:
            raise FileNotFoundError(f"{' '.join(map(str, options.logs))}: no such logs")
        table = make_table(results)
        columns = table.set_axis([f"{dataset}-{metric}" for dataset, metric in table.columns], axis=1).reset_index()
        columns["step"] = columns["step"].astype("Int64").where(columns["step"] >= 0)
        with replacing(options.output) as unfinished:
            columns.to_csv(unfinished, index=False, lineterminator="\n", float_format="%.10g")
        with replacing(options.output.with_suffix(".md")) as unfinished:
            unfinished.write_text(markdown(table), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"read_log: {error}")
    print(options.output, options.output.with_suffix(".md"), sep="\n")


if __name__ == "__main__":
    main()
