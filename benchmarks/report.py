"""Helpers of all benchmarks and comparisons: options, sides that take turns, intervals, the results file."""

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import TypeVar

import mpmath
import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
Result = TypeVar("Result")


def parser_of(doc: str, **defaults: int | float | str) -> argparse.ArgumentParser:
    """Return a parser that shows `doc` as its help and has an option for each default, with the default's type."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser


def in_turns(sides: Mapping[str, Callable[[int], Result]], runs: int) -> dict[str, list[Result]]:
    """Call each side with each run's number and return the results; sides alternate, so disturbances affect all."""
    results = {name: [] for name in sides}
    for run in range(runs):
        for name, side in sides.items():
            results[name].append(side(run))
    return results


def with_range(values: Sequence[float], form: str) -> str:
    """Return the median as text, with the least and the greatest value in brackets."""
    middle, least, greatest = (format(x, form) for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {greatest})"


@cache
def t_quantile(level: float, freedom: int) -> float:
    """Return the t that Student's |t| exceeds with probability `level`."""
    with mpmath.workdps(30):
        share = mpmath.findroot(
            lambda x: mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True) - level,
            (1e-30, 1),
            solver="bisect",
            tol=1e-30,
        )
        return float(mpmath.sqrt(freedom / share - freedom))


def interval(values: Sequence[float], level: float = 0.05) -> tuple[float, float]:
    """Return the mean, and half of its interval of Student's t, which misses it with probability `level`; one value has
    an infinite interval."""
    n = len(values)
    half = t_quantile(level, n - 1) * np.std(values, ddof=1) / n**0.5 if n > 1 else np.inf
    return float(np.mean(values)), float(half)


def machine() -> str:
    """Return the machine's CPU, cores and memory in words, and a GPU's name where torch sees one."""
    import torch

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return f"{model}, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB{gpu}"


def commit() -> str:
    """Return the repository's commit in words, and whether tracked files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty= with uncommitted changes"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "Not in a git repository"
    return f"Commit {done.stdout.strip()}"


def report_text(name: str, what: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the page: a title, the text `what`, the table, the machine, the command and the commit."""
    module = sys.modules["__main__"].__spec__
    program = ["-m", module.name] if module else [os.path.relpath(sys.argv[0])]
    command = shlex.join(["python", *program, *sys.argv[1:]])
    made = f"Machine: {machine()}. Command: `{command}`. {commit()}. {date.today()}."
    table = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join([f"# {name}", "", what, "", *table, "", made])


def write_report(
    name: str, what: str, header: Sequence[str], rows: Sequence[Sequence[str]], folder: Path = RESULTS
) -> Path:
    """Write <folder>/<name>.md, by default in benchmarks/results, print it, and return its path."""
    text = report_text(name, what, header, rows)
    path = folder / f"{name}.md"
    path.write_text(text + "\n")
    print(text)
    return path
