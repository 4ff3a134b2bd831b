"""Compares an evaluation with a published number, and says in which settings the two differ.

    python -m verl.evaluation.scores.published outputs/results/NAME/step_N/gsm8k.log metric=Acc-Pass@1 value=0.912 n=1
    python -m verl.evaluation.scores.published outputs/results/NAME/step_N/gsm8k.log rows.yaml

rows.yaml holds a published row, or a list of them; rows of other data sets are left out:

    - {source: "the paper, table 1", dataset: gsm8k, metric: Acc-Pass@1, value: 0.912, questions: 1319, n: 1,
       temperature: 0, prompt: boxed, judge: none}

Take from the paper what it states; what a row leaves out is reported as not stated.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from verl.evaluation.scores.results import INTERVAL_ENDS, EvalResult, parse_result_lines
from verl.evaluation.settings import SAMPLING

NEEDED, ABOUT = ("metric", "value"), ("source", "dataset")
SETTINGS = ("questions", "n", *SAMPLING, "prompt", "tools", "scoring", "judge")


def read_published(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return published rows from the path of a YAML file, or from the `key=value` texts of one row.

    Raises:
        ValueError: a row lacks a key or has an unknown one, or its value is no share from 0 to 1.
    """
    if len(texts) == 1 and "=" not in texts[0]:
        content = yaml.safe_load(Path(texts[0]).read_text(encoding="utf-8"))
        rows = content if isinstance(content, list) else [content]
    else:
        rows = [OmegaConf.to_container(OmegaConf.from_dotlist(list(texts)))]
    for number, row in enumerate(rows):
        _check_row(row, f"published row {number}")
    return rows


def _check_row(row: Any, where: str) -> None:
    keys = (*NEEDED, *ABOUT, *SETTINGS)
    if not isinstance(row, dict) or not set(NEEDED) <= set(row):
        raise ValueError(f"{where}: expected {' and '.join(NEEDED)}, and perhaps {', '.join(keys[2:])}; got {row!r}")
    if unknown := sorted(set(map(str, row)) - set(keys)):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; choose from {', '.join(keys)}")
    if isinstance(row["value"], bool) or not isinstance(row["value"], int | float) or not 0 <= row["value"] <= 1:
        raise ValueError(f"{where}: value={row['value']!r}: expected a share from 0 to 1, such as 0.912 for 91.2 %")


def compare(result: EvalResult, row: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of the published row and the evaluation, and sentences about their differences.

    Raises:
        ValueError: the evaluation has no such metric.
    """
    metric, value, source = row["metric"], row["value"], row.get("source", "published")
    if metric not in result.metrics:
        raise ValueError(f"metric={metric}: the evaluation has {', '.join(result.metrics)}")
    here = result.metrics[metric]
    ends = [result.metrics.get(metric + end) for end in INTERVAL_ENDS]
    interval = "" if None in ends else f" ({ends[0]:.3f} to {ends[1]:.3f})"
    verdict = "" if None in ends else "inside" if ends[0] <= value <= ends[1] else "above" if value > here else "below"
    ours = result.settings | {"n": result.n_samples, "questions": result.n_questions}
    lines = [f"| {_cell(result.dataset)} | {_cell(source)} | {_cell(result.experiment)} | |", "|---|---|---|---|"]
    lines.append(f"| {metric} | {value:.3f} | {here:.3f}{interval} | |")
    kinds: dict[str, list[str]] = {"same": [], "differs": [], "not stated": [], "not recorded": []}
    for name in SETTINGS:
        kind = _kind(row, ours, name)
        kinds[kind].append(name)
        lines.append(f"| {name} | {_cell(row.get(name))} | {_cell(ours.get(name))} | {kind} |")
    lines.append("")
    if verdict:
        lines.append(
            f"The published value is {verdict} the 95 % interval, which shows how much the choice of questions changes "
            "the value here."
        )
    if kinds["differs"]:
        lines.append(f"The settings differ in {', '.join(kinds['differs'])}.")
    if kinds["not stated"]:
        lines.append(f"The published row does not state {', '.join(kinds['not stated'])}.")
    return lines


def _kind(row: Mapping, ours: Mapping, name: str) -> str:
    """Return how a setting compares; a setting that a published row leaves out or sets to null is not stated."""
    if row.get(name) is None:
        return "not stated"
    if name not in ours:
        return "not recorded"
    return "same" if row[name] == ours[name] or str(row[name]) == str(ours[name]) else "differs"


def _cell(value: Any) -> str:
    """Return a value as a cell of a Markdown table: one line, in which the sign that separates cells is escaped."""
    text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else "-" if value is None else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def tables(log: Path, published: Sequence[str]) -> list[str]:
    """Return the lines of all comparisons (`compare`) of a published row with the log's result on its data set.

    A row without `dataset` is compared with every result in the log.

    Raises:
        ValueError: the log has no result, a published row is wrong, or none is about a data set of the log.
    """
    results = parse_result_lines(log.read_text(encoding="utf-8").splitlines(), str(log))
    if not results:
        raise ValueError(f"{log}: no lines like RESULT {{json}}; expected the log of an evaluation")
    rows, lines = read_published(published), []
    for result in results:
        for row in rows:
            if row.get("dataset", result.dataset) == result.dataset:
                lines += [*compare(result, row), ""]
    if not lines:
        datasets = ", ".join(sorted({result.dataset for result in results}))
        raise ValueError(f"no published row is about {datasets}, which {log} has; correct their dataset")
    return lines[:-1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, metavar="LOG", help="log of an evaluation")
    parser.add_argument("published", nargs="+", metavar="ROW", help="a YAML file of rows, or key=value of one row")
    args = parser.parse_args(arguments)
    try:
        print("\n".join(tables(args.log, args.published)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
