"""Calls per second and latency of the python tool, against a fresh, unconfined interpreter for each call.

    python -m benchmarks.python_tool [--rounds 5] [--calls 200]

Baseline: `asyncio.create_subprocess_exec(sys.executable, "-I", "-c", program)`. Every round measures baseline and tool
in turn, with 1 and with 16 calls at a time. Writes benchmarks/results/python_tool.md.
"""

import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.report import in_turns, parser_of, write_report
from verl.workers.rollout.tools.python_tool import PythonTool

PROGRAM = "total = sum(i * i for i in range(100))\nprint(total)"
ANSWER = "328350\n"
BASELINE = "fresh interpreter (baseline)"
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


def rows_of(rounds: int, calls: int) -> list[tuple[str, ...]]:
    """The table: for 1 and for 16 calls at a time the baseline and the tool at each level of isolation."""
    loop = asyncio.new_event_loop()
    tools = {f"tool, {level}": PythonTool(isolation=level) for level in ("namespaces", "process")}
    executions = {name: partial(tool.execute, PROGRAM, timeout=60) for name, tool in tools.items()}

    def side(call: Call, calls: int, at_once: int) -> Callable[[int], tuple[float, list[float]]]:
        return lambda run: loop.run_until_complete(measure(call, calls, at_once))

    rows = []
    for at_once in (1, 16):
        sides = {BASELINE: side(fresh_interpreter, calls // 4, at_once)}
        sides |= {name: side(execution, calls, at_once) for name, execution in executions.items()}
        results = in_turns(sides, rounds + 1)
        rates = {name: [rate for rate, _ in runs[1:]] for name, runs in results.items()}  # the first round warms up
        for name, runs in results.items():
            ratio = statistics.median(a / b for a, b in zip(rates[name], rates[BASELINE], strict=True))
            cuts = statistics.quantiles([each for _, milliseconds in runs[1:] for each in milliseconds], n=100)
            rate = f"{statistics.median(rates[name]):.0f}"
            rows.append((str(at_once), name, rate, f"{cuts[49]:.1f}", f"{cuts[98]:.1f}", f"{ratio:.1f}"))
    for tool in tools.values():
        loop.run_until_complete(tool.close())
    loop.close()
    return rows


def main() -> None:
    arguments = parser_of(__doc__, rounds=5, calls=200).parse_args()
    logging.disable(logging.WARNING)
    load = os.getloadavg()[0]
    rows = rows_of(arguments.rounds, arguments.calls)
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
