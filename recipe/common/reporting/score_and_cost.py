"""Prints a table of what models scored and of what their training cost, the last screen of scripts/quickstart.sh.

    python -m recipe.common.reporting.score_and_cost \\
        --model GRPO outputs/results/grpo/step_40/countdown.log outputs/grpo \\
        --model HAPO outputs/results/hapo/step_40/countdown.log outputs/hapo

Each --model names a model, the log of its evaluation, and its run folder with `metrics.jsonl`. A warm start, whose run
generates nothing, has no costs in the table.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from recipe.common.reporting.run_metrics import WARM_UP_STEPS, generated_tokens, load_metrics
from verl.evaluation.scores.results import pass_at_1, read_result_log

HEADER = ("model", "Pass@1 (95 % interval)", "tokens generated", "tokens the update computed", "seconds a step")
SHARES = ("perf/unique_token_share", "perf/trained_token_share")


def computed_share(metrics: pd.DataFrame) -> float:
    """Return the mean share of the rows' tokens that an update computed: with `update=tree` less than 1."""
    shares = metrics[[name for name in SHARES if name in metrics]].dropna(how="all")
    return 1.0 if shares.empty else float(shares.prod(axis=1).mean())


def costs(metrics: pd.DataFrame) -> tuple[str, str, str]:
    """Return three cells: tokens generated in the run, mean share that updates computed, median seconds of a step. They
    are dashes for a run that generated nothing."""
    if "tree/tokens_generated" not in metrics:
        return ("-",) * 3
    steps = metrics["timing_s/step"].dropna()
    seconds = steps.iloc[WARM_UP_STEPS:] if len(steps) > WARM_UP_STEPS else steps
    return f"{generated_tokens(metrics).sum():,.0f}", f"{computed_share(metrics):.0%}", f"{seconds.median():.1f}"


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Return the rows as text: the first two columns begin together, the others end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, "<<>>>", widths, strict=True)] for row in rows]
    return "\n".join("   ".join(cells).rstrip() for cells in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=3, action="append", required=True, metavar=("NAME", "LOG", "RUN"))
    options = parser.parse_args(arguments)
    rows: list[tuple[str, ...]] = [HEADER]
    try:
        for name, log, run in options.model:
            rows.append((name, pass_at_1(read_result_log(Path(log))[-1].metrics), *costs(load_metrics(run))))
    except (OSError, ValueError) as error:
        sys.exit(f"score_and_cost: {error}")
    print(aligned(rows))


if __name__ == "__main__":
    main()
