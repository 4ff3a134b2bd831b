"""Calls per second of the Python tool, and of a fresh, unconfined interpreter for each call, in turn.

    python -m benchmarks.python_tool [--runs 9] [--calls 200]

Baseline: `asyncio.create_subprocess_exec(sys.executable, "-I", "-c", program)`. Every run measures both with 1 and with
16 calls at a time; CPU is what this process and all its children used, per call. Bounds: forks of an interpreter that
has imported what a sandbox's has, which nothing confines, cleans or asks. Writes benchmarks/results/python_tool.md.
"""

import ast
import asyncio
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.report import in_turns, parser_of, write_report
from verl.workers.rollout.tools import python_tool
from verl.workers.rollout.tools.python_tool import PythonTool

PROGRAM = "total = sum(i * i for i in range(100))\nprint(total)"
FILE_PROGRAM = PROGRAM + "\nopen('total', 'w').write(str(total))"
NAMESPACES = {"tool": PROGRAM, "tool, a file each": FILE_PROGRAM}
AT_ONCE = (1, 16)
BASELINE = "fresh interpreter (baseline)"
BOUNDS = {"bound: a fork that ends": "", "bound: a fork that runs the program": PROGRAM}
FORKS = """
import gc, os, sys, time
directory, program, forks = sys.argv[1:]
sys.path.append(directory)
import python_worker
sys.stdout, told = open(os.devnull, "w"), os.dup(1)
exec(compile(program, "program", "exec"), {})
gc.freeze()
milliseconds, before = [], sum(os.times()[:4])
for _ in range(int(forks)):
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        if program:
            exec(compile(program, "program", "exec"), {})
        os._exit(0)
    os.waitpid(pid, 0)
    milliseconds.append(1000 * (time.perf_counter() - start))
os.write(told, repr((sum(os.times()[:4]) - before, milliseconds)).encode())
"""
Call = Callable[[], Awaitable[str]]


class Measured(NamedTuple):
    """Calls per second, CPU milliseconds per call, wall-clock milliseconds of each call."""

    rate: float
    cpu: float
    milliseconds: list[float]


async def fresh_interpreter() -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", PROGRAM, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    return (await process.communicate())[0].decode()


def cpu_seconds() -> float:
    """Of this process, its descendants, and those that have been waited for."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:  # has ended since, and counts in its parent's
            continue
    return total


async def measure(call: Call, calls: int, at_once: int) -> Measured:
    left, milliseconds = iter(range(calls)), []

    async def caller() -> None:
        for _ in left:
            start = time.perf_counter()
            assert (await call()).startswith("328350\n")
            milliseconds.append(1000 * (time.perf_counter() - start))

    start, cpu = time.perf_counter(), cpu_seconds()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return Measured(calls / (time.perf_counter() - start), 1000 * (cpu_seconds() - cpu) / calls, milliseconds)


def bare_forks(program: str, forks: int) -> Measured:
    """Of an interpreter that is ready, one after another; each runs `program`, if it is not empty, and ends."""
    directory = str(Path(python_tool.__file__).parent)
    command = [sys.executable, "-I", "-B", "-X", "utf8", "-c", FORKS, directory, program, str(forks)]
    environment = os.environ | {"LD_BIND_NOW": "1"}  # as a sandbox's interpreter
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    cpu, milliseconds = ast.literal_eval(told)
    return Measured(1000 * forks / sum(milliseconds), 1000 * cpu / forks, milliseconds)


def row_of(at_once: int, name: str, measured: list[Measured], baseline: list[Measured]) -> tuple[str, ...]:
    def ratio(get: Callable[[Measured], float]) -> str:
        return f"{statistics.median(get(a) / get(b) for a, b in zip(measured, baseline, strict=True)):.1f}"

    latencies = [value for run in measured for value in run.milliseconds]
    cuts = statistics.quantiles(latencies, n=100)
    rate, cpu = (
        statistics.median(column) for column in ([run.rate for run in measured], [run.cpu for run in measured])
    )
    ratios = ratio(lambda run: run.rate), ratio(lambda run: 1 / run.cpu)
    return str(at_once), name, f"{rate:.0f}", f"{cuts[49]:.1f}", f"{cuts[98]:.1f}", f"{cpu:.1f}", *ratios


def main() -> None:
    arguments = parser_of(__doc__, runs=9, calls=200).parse_args()
    logging.disable(logging.WARNING)
    loop = asyncio.new_event_loop()
    tools = {name: (program, "namespaces") for name, program in NAMESPACES.items()}
    tools["tool without namespaces"] = (PROGRAM, "process")
    made = {name: PythonTool(isolation=level) for name, (_, level) in tools.items()}
    ways: dict[str, Call] = {BASELINE: fresh_interpreter}
    for name, (program, _) in tools.items():
        ways[name] = lambda tool=made[name], program=program: tool.execute(program, timeout=60)
    for call in ways.values():  # warm
        loop.run_until_complete(measure(call, 40, 4))

    def side(call: Call, calls: int, at_once: int) -> Callable[[int], Measured]:
        return lambda run: loop.run_until_complete(measure(call, calls, at_once))

    def forked(program: str, forks: int) -> Callable[[int], Measured]:
        return lambda run: bare_forks(program, forks)

    rows, load = [], []
    for at_once in AT_ONCE:
        load.append(os.getloadavg()[0])
        calls = {name: arguments.calls // (1 if name in NAMESPACES else 4) for name in ways}
        sides = {name: side(call, calls[name], at_once) for name, call in ways.items()}
        if at_once == 1:
            sides |= {name: forked(program, arguments.calls) for name, program in BOUNDS.items()}
        measured = in_turns(sides, arguments.runs)
        rows += [row_of(at_once, name, measured[name], measured[BASELINE]) for name in sides]
    for tool in made.values():
        loop.run_until_complete(tool.close())
    write_report(
        "python_tool",
        f"A program of two lines, {arguments.runs} runs in which the ways take turns; medians, and medians of the "
        "runs' ratios to the baseline. CPU: milliseconds per call of all processes. The baseline confines nothing. "
        "The process of a sandbox's next call is forked while its last answer is on the way: latency leaves that out, "
        "CPU does not. Bounds: an interpreter that has imported what a sandbox's has is forked in a loop, and nothing "
        "confines, cleans, asks or reads the fork: the second bound's ratio of CPU is more than a tool that "
        "forks this interpreter can reach. "
        f"Load of the machine when the rows began, ours included: {' and '.join(f'{value:.1f}' for value in load)}. "
        "Target: 20 times the calls per second.",
        ("at once", "way", "calls/s", "p50 ms", "p99 ms", "CPU ms", "calls/s, ratio", "calls per CPU second, ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
