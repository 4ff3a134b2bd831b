"""Compares the Python tool's calls per second with those of a fresh, unconfined interpreter for each call.

    python -m benchmarks.python_tool [--runs 7] [--calls 200]

Baselines: `asyncio.create_subprocess_exec(sys.executable, "-I", "-c", program)`, with the same program. In each setting
of benchmarks/sandbox_settings.py, all ways take turns, with 1 and with 16 calls at a time. CPU is the CPU time that
this process and all its children used per call. Writes benchmarks/results/python_tool.md.
"""

import asyncio
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import psutil

from benchmarks.report import in_turns, parser_of, write_report
from benchmarks.sandbox_settings import SETTINGS, command_in
from verl.workers.rollout.tools.python.tool import PythonTool

BARE = "total = sum(i * i for i in range(100))\nprint(total)"
MODULES = "import numpy, sympy\n" + BARE
FILE = BARE + "\nopen('total', 'w').write(str(total))"
FRESH, FRESH_MODULES = "fresh interpreter (baseline)", "fresh interpreter that imports numpy and sympy (baseline)"
# way: program, whether the tool runs it, the way's baseline, share of --calls
WAYS = {
    FRESH: (BARE, False, FRESH, 0.5),
    "tool": (BARE, True, FRESH, 1.0),
    "tool, a file each": (FILE, True, FRESH, 1.0),
    FRESH_MODULES: (MODULES, False, FRESH_MODULES, 0.08),
    "tool, numpy and sympy": (MODULES, True, FRESH_MODULES, 1.0),
}
AT_ONCE = (1, 16)
Call = Callable[[], Awaitable[str]]


class Measured(NamedTuple):
    """Calls per second, CPU milliseconds per call, wall-clock milliseconds of each call."""

    rate: float
    cpu: float
    milliseconds: list[float]


async def fresh_interpreter(program: str) -> str:
    """Run a program in a new Python process; return its output and errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    return (await process.communicate())[0].decode()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, including ended ones that were waited for."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:  # the process has ended, and its time counts as its parent's
            continue
    return total


async def measure(call: Call, calls: int, at_once: int) -> Measured:
    """Make `calls` calls, `at_once` of them at a time, and check what each prints."""
    left, milliseconds = iter(range(calls)), []

    async def caller() -> None:
        for _ in left:
            start = time.perf_counter()
            printed = await call()
            assert printed.startswith("328350\n"), printed
            milliseconds.append(1000 * (time.perf_counter() - start))

    start, cpu = time.perf_counter(), cpu_seconds()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return Measured(calls / (time.perf_counter() - start), 1000 * (cpu_seconds() - cpu) / calls, milliseconds)


def measure_all(runs: int, calls: int) -> dict[str, dict[str, list[Measured]]]:
    """Measure all ways with the rights that this process has; return calls at a time -> way -> result of each run."""
    logging.disable(logging.WARNING)
    loop, tool = asyncio.new_event_loop(), PythonTool()
    loop.run_until_complete(tool.start(timeout=60))

    def side(program: str, by_tool: bool, share: float, at_once: int) -> Callable[[int], Measured]:
        call = (lambda: tool.execute(program, timeout=60)) if by_tool else (lambda: fresh_interpreter(program))
        return lambda run: loop.run_until_complete(measure(call, int(calls * share), at_once))

    measured = {}
    for at_once in AT_ONCE:
        sides = {way: side(program, by, share, at_once) for way, (program, by, _, share) in WAYS.items()}
        measured[at_once] = in_turns(sides, runs)
    loop.run_until_complete(tool.close())
    return measured


def row_of(setting: str, at_once: str, way: str, ways: dict[str, list]) -> tuple[str, ...]:
    """Return the table's row of a way; `ways` maps way -> runs in the form of `Measured`."""
    measured, baseline = ([Measured(*run) for run in ways[name]] for name in (way, WAYS[way][2]))
    cuts = statistics.quantiles([value for run in measured for value in run.milliseconds], n=100)
    rate, cpu = (statistics.median(column) for column in zip(*[run[:2] for run in measured], strict=True))
    ratio = statistics.median(a.rate / b.rate for a, b in zip(measured, baseline, strict=True))
    return setting, at_once, way, f"{rate:.0f}", f"{cuts[49]:.1f}", f"{cuts[98]:.1f}", f"{cpu:.1f}", f"{ratio:.1f}"


def main() -> None:
    parser = parser_of(__doc__, runs=7, calls=200)
    parser.add_argument("--measure", action="store_true", help="in this process's setting, as JSON to standard output")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_all(arguments.runs, arguments.calls)))
        return
    rows = []
    for setting in SETTINGS:
        command = [sys.executable, "-m", "benchmarks.python_tool", "--measure"]
        command += ["--runs", str(arguments.runs), "--calls", str(arguments.calls)]
        done = subprocess.run(command_in(setting, command), stdout=subprocess.PIPE, check=True)
        for at_once, ways in json.loads(done.stdout.splitlines()[-1]).items():
            rows += [row_of(setting, at_once, way, ways) for way in WAYS]
    write_report(
        "python_tool",
        f"A program of two lines, {arguments.runs} runs in which the ways take turns; medians, and medians of the "
        "runs' ratios to the baseline that imports the same. CPU: milliseconds per call of all processes. The "
        "baselines confine nothing. A process is forked and confined ahead of the call: the latency leaves that out, "
        "calls/s and CPU do not. Settings: " + "; ".join(f"`{name}`, {what}" for name, what in SETTINGS.items()) + ". "
        "Targets: 6 times the bare interpreter's calls per second in each setting, 50 times those of one that imports "
        "numpy and sympy.",
        ("setting", "at once", "way", "calls/s", "p50 ms", "p99 ms", "CPU ms", "calls/s, ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
