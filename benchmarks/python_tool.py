"""Calls per second and latency of the python tool, against a fresh, unconfined interpreter for each call.

    python benchmarks/python_tool.py [--rounds 5] [--calls 200]

Baseline: `asyncio.create_subprocess_exec(sys.executable, "-I", "-c", program)`. Every round measures baseline and tool
in turn, with 1 and with 16 calls at a time. Writes benchmarks/results/python_tool.md.
"""

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks.report import write_report
from verl.workers.rollout.tools.python_tool import PythonTool

PROGRAM = "total = sum(i * i for i in range(100))\nprint(total)"
ANSWER = "328350\n"
Call = Callable[[], Awaitable[str]]


async def fresh_interpreter() -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", PROGRAM, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    return (await process.communicate())[0].decode()


async def measure(call: Call, calls: int, at_once: int) -> tuple[float, list[float]]:
    """Calls per second, and the milliseconds of each call."""
    left, milliseconds = iter(range(calls)), []

    async def caller() -> None:
        for _ in left:
            start = time.perf_counter()
            assert await call() == ANSWER
            milliseconds.append(1000 * (time.perf_counter() - start))

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return calls / (time.perf_counter() - start), milliseconds


async def run(rounds: int, calls: int) -> list[tuple[str, ...]]:
    tools = {f"tool, {level}": PythonTool(isolation=level) for level in ("namespaces", "process")}
    ways: dict[str, Call] = {"fresh interpreter (baseline)": fresh_interpreter}
    for name, tool in tools.items():
        ways[name] = lambda tool=tool: tool.execute(PROGRAM, timeout=60)
    for call in ways.values():  # warm
        await measure(call, 20, 4)
    rows = []
    for at_once in (1, 16):
        rates, latencies = {name: [] for name in ways}, {name: [] for name in ways}
        for _ in range(rounds):
            for name, call in ways.items():
                rate, milliseconds = await measure(call, calls if name in tools else calls // 4, at_once)
                rates[name].append(rate)
                latencies[name] += milliseconds
        baseline = rates["fresh interpreter (baseline)"]
        for name in ways:
            ratio = statistics.median(a / b for a, b in zip(rates[name], baseline, strict=True))
            cuts = statistics.quantiles(latencies[name], n=100)
            rate = f"{statistics.median(rates[name]):.0f}"
            rows.append((str(at_once), name, rate, f"{cuts[49]:.1f}", f"{cuts[98]:.1f}", f"{ratio:.1f}"))
    for tool in tools.values():
        await tool.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    load = os.getloadavg()[0]
    rows = asyncio.run(run(arguments.rounds, arguments.calls))
    write_report(
        "python_tool",
        f"A program of two lines, median of {arguments.rounds} alternating rounds; the ratio is the median of the "
        "rounds' ratios of calls per second. Load of the machine by others at the start: "
        f"{load:.1f}. The baseline confines nothing. Target: 20.",
        ("at once", "way", "calls/s", "p50 ms", "p99 ms", "ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
