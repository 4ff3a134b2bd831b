"""Time, memory and error against float64 of this project's tensor computations on a GPU, at real sizes.

    python -m benchmarks.gpu_kernels                           # a machine with one GPU; needs torch only
    python -m benchmarks.gpu_kernels --device cpu --small      # seconds, anywhere: does it run at all?

The first case of each block is the baseline. Prints a page in Markdown and writes no file.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.report import parser_of, report_text, with_range
from vllm_patches.entropy_temperature import compute_entropy_based_temperature, entropy_of_logits

WARM_UP = 2
HEADER = ("what", "case", "ms: median (least to most)", "times the baseline", "peak MiB", "error")
HAPO = {"temperature_tau": 0.05, "median": -0.1, "std": 3.0, "scale_pos": 1.0, "scale_neg": 0.5}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of the inputs; the defaults are those of training Qwen2.5-7B."""

    tokens: int = 16_384  # number of tokens; the entropy of their logits is computed
    vocabulary: int = 152_064
    chunk: int = 2_048  # tokens that are computed at once where the computation is split
    decoded_rows: tuple[int, ...] = (64, 256, 1024)  # numbers of sequences that decode a token at the same time


SMALL = Sizes(tokens=64, vocabulary=1_000, chunk=16, decoded_rows=(4, 8))


class Case(NamedTuple):
    """A function to measure, and a function that returns the error of its first result."""

    name: str
    run: Callable[[], torch.Tensor]
    error: Callable[[torch.Tensor], float]


def timed(run: Callable, device: torch.device) -> tuple[float, float]:
    """Return the milliseconds of one run, and the peak MiB that it added to the memory in use (on a CPU: NaN)."""
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


def measure(what: str, cases: list[Case], device: torch.device, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each case; the row says so if the case runs out of the GPU's memory."""
    baseline = math.nan
    for case in cases:
        try:
            error = case.error(case.run())
            runs = [timed(case.run, device) for _ in range(WARM_UP + repeats)][WARM_UP:]
        except torch.OutOfMemoryError:
            yield what, case.name, "out of memory", "", "", ""
            continue
        times, memory = [run[0] for run in runs], runs[-1][1]
        baseline = statistics.median(times) if case is cases[0] else baseline
        ratio = f"{statistics.median(times) / baseline:.2f}"
        yield what, case.name, with_range(times, ".3f"), ratio, f"{memory:,.0f}", f"{error:.1e}"


def random_logits(rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return (rows, vocabulary) logits, from nearly uniform rows to nearly certain ones."""
    spread = torch.linspace(0.1, 12, rows, device=device).unsqueeze(-1)
    return torch.randn(rows, vocabulary, device=device, dtype=dtype).mul_(spread)


def softmax_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy (R,) in the dtype of the logits: log sum e^x - sum p x."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def exact_temperature(logits: torch.Tensor) -> torch.Tensor:
    """Return the factor T'/T (R,) by which HAPO changes each row's temperature, in float64."""
    z = (softmax_entropy(logits.double()).clamp(min=1e-6).log() - HAPO["median"]) / HAPO["std"]
    h = (z * torch.where(z > 0, HAPO["scale_pos"], HAPO["scale_neg"])).clamp(-1, 1)
    return 1 + HAPO["temperature_tau"] * h


def largest_difference(result: torch.Tensor, exact: torch.Tensor) -> float:
    return (result.double() - exact).abs().max().item()


def entropy_rows(sizes: Sizes, device: torch.device, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of ways to compute the entropy of bfloat16 logits (tokens, vocabulary)."""
    logits = random_logits(sizes.tokens, sizes.vocabulary, device, torch.bfloat16)
    some = slice(None, None, max(sizes.tokens // 64, 1))
    exact = softmax_entropy(logits[some].double())

    def chunked(entropy: Callable) -> Callable:
        return lambda: torch.cat([entropy(part) for part in logits.split(sizes.chunk)])

    def error(entropy: torch.Tensor) -> float:
        return largest_difference(entropy[some], exact)

    cases = [
        Case("softmax, at once in bf16", lambda: softmax_entropy(logits), error),
        Case(f"softmax, float32 in chunks of {sizes.chunk:,}", chunked(lambda p: softmax_entropy(p.float())), error),
        Case(f"one exponential a logit, chunks of {sizes.chunk:,}", chunked(entropy_of_logits), error),
    ]
    return measure(f"entropy, {sizes.tokens:,} x {sizes.vocabulary:,} bf16", cases, device, repeats)


def temperature_rows(rows: int, sizes: Sizes, device: torch.device, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a softmax of (rows, vocabulary) logits, and of dividing them by HAPO's temperature in place."""
    logits = random_logits(rows, sizes.vocabulary, device, torch.float32)
    some = slice(None, None, max(rows // 64, 1))
    wide = logits[some].double()
    exact, highest = exact_temperature(wide), wide.abs().argmax(-1, keepdim=True)

    def divide(values: torch.Tensor) -> torch.Tensor:
        return values.div_(compute_entropy_based_temperature(values, **HAPO).unsqueeze(-1))

    def error(divided: torch.Tensor) -> float:
        return largest_difference((wide / divided[some].double()).gather(1, highest).squeeze(1), exact)

    cases = [
        Case("softmax", lambda: logits.softmax(-1), lambda p: largest_difference(p[some], wide.softmax(-1))),
        Case("adaptive temperature", partial(divide, logits.clone()), error),
    ]
    return measure(f"HAPO's decode step, {rows:,} x {sizes.vocabulary:,} float32", cases, device, repeats)


def all_rows(sizes: Sizes, device: torch.device, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows block by block, so that one block's memory is free before the next."""
    for block in (entropy_rows, *(partial(temperature_rows, rows) for rows in sizes.decoded_rows)):
        yield from block(sizes, device, repeats)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = parser_of(__doc__, device="cuda", repeats=7)
    parser.add_argument("--small", action="store_true", help="sizes for a test on a CPU")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = list(all_rows(SMALL if args.small else Sizes(), torch.device(args.device), args.repeats))
    what = (
        f"{args.repeats} runs after {WARM_UP} to warm up. Memory: peak above the inputs. Error against float64: the "
        "largest difference (entropy in nats, softmax in probability, temperature as T'/T). "
        f"torch {torch.__version__}."
    )
    print(report_text("gpu_kernels", what, HEADER, rows))


if __name__ == "__main__":
    main()
