"""How benchmarks/gpu_kernels.py measures: blocks of cases that do the same job, timed one after the other."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

WARM_UP = 2
HEADER = ("what", "case", "ms: min / median / max", "times the baseline", "peak MiB", "tokens/s", "error")


class Case(NamedTuple):
    """`run` is what is measured; `error` takes its result and gives one or more numbers."""

    name: str
    run: Callable
    error: Callable[..., tuple[float, ...]]


class Block(NamedTuple):
    """Cases that do the same job; the first is the baseline."""

    what: str
    tokens: int
    cases: list[Case]


def timed(run: Callable, device: torch.device) -> tuple[float, float]:
    """Milliseconds of one run, and the peak of its memory above what lay there before, in MiB (CPU: no number)."""
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started), math.nan
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started), (torch.cuda.max_memory_allocated() - before) / 2**20


def rows_of(block: Block, device: torch.device, repeats: int) -> Iterator[tuple[str, ...]]:
    """A row of the table for each case; one that runs out of the GPU's memory says so."""
    baseline = math.nan
    for case in block.cases:
        try:
            error = " / ".join(f"{number:.1e}" for number in case.error(case.run()))
            runs = [timed(case.run, device) for _ in range(WARM_UP + repeats)][WARM_UP:]
        except torch.OutOfMemoryError:
            yield block.what, case.name, "out of memory", "", "", "", ""
            continue
        times, memory = [run[0] for run in runs], runs[-1][1]
        median = statistics.median(times)
        baseline = median if case is block.cases[0] else baseline
        ratio = "baseline" if case is block.cases[0] else f"{median / baseline:.2f}"
        milliseconds = " / ".join(map(_digits, (min(times), median, max(times))))
        peak = "not measured" if math.isnan(memory) else f"{memory:,.0f}"
        yield block.what, case.name, milliseconds, ratio, peak, f"{1e3 * block.tokens / median:,.0f}", error


def _digits(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"
