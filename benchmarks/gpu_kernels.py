"""Time, memory and error against float64 of this project's tensor computations on a GPU, at real sizes.

    python -m benchmarks.gpu_kernels [--repeats 7] [--output]        # a machine with one GPU
    python -m benchmarks.gpu_kernels --device cpu --small            # seconds, anywhere: does it run at all?

Needs torch only; the two losses also need verl and say so where it is missing. The first case of each block is the
baseline that the others are compared with. --output writes benchmarks/results/gpu_kernels.md.
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

from benchmarks.report import parser_of, report_text, write_report
from vllm_patches.entropy_temperature import compute_entropy_based_temperature, entropy_of_logits

WARM_UP = 2
HEADER = ("what", "case", "ms: min / median / max", "times the baseline", "peak MiB", "tokens/s", "error")
HAPO = {"temperature_tau": 0.05, "median": -0.1, "std": 3.0, "scale_pos": 1.0, "scale_neg": 0.5}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of the inputs; the defaults are those of training Qwen2.5-7B.

    Args:
        tokens: tokens of the logits whose entropy is computed.
        chunk: tokens that are computed at once where the computation is split.
        decoded_rows: numbers of sequences that decode a token at the same time.
        sequences: rows of the losses' mini-batch.
        longest: largest number of tokens of such a row.
    """

    tokens: int = 16_384
    vocabulary: int = 152_064
    chunk: int = 2_048
    decoded_rows: tuple[int, ...] = (64, 256, 1024)
    sequences: int = 512
    longest: int = 8_192


SMALL = Sizes(tokens=64, vocabulary=1_000, chunk=16, decoded_rows=(4, 8), sequences=6, longest=40)


class Case(NamedTuple):
    """A function to measure, `run`, and a function `error` that returns one or more errors of its result."""

    name: str
    run: Callable
    error: Callable[..., tuple[float, ...]]


class Block(NamedTuple):
    """Cases that one part of the table compares; the first is the baseline. `tokens` are those of one run."""

    what: str
    tokens: int
    cases: list[Case]


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


def rows_of(block: Block, device: torch.device, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each case; the row says so if the case runs out of the GPU's memory."""
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


def largest_difference(result: torch.Tensor, exact: torch.Tensor) -> tuple[float]:
    """Return the largest absolute difference, as the one error of a `Case`."""
    return ((result.double() - exact).abs().max().item(),)


def entropy_block(sizes: Sizes, device: torch.device) -> Block:
    """Return the block of ways to compute the entropy of bfloat16 logits (tokens, vocabulary)."""
    logits = random_logits(sizes.tokens, sizes.vocabulary, device, torch.bfloat16)
    some = slice(None, None, max(sizes.tokens // 64, 1))
    exact = softmax_entropy(logits[some].double())

    def chunked(entropy: Callable) -> Callable:
        return lambda: torch.cat([entropy(part) for part in logits.split(sizes.chunk)])

    def error(entropy: torch.Tensor) -> tuple[float]:
        return largest_difference(entropy[some], exact)

    cases = [
        Case("softmax, at once in bf16", lambda: softmax_entropy(logits), error),
        Case(f"softmax, float32 in chunks of {sizes.chunk:,}", chunked(lambda p: softmax_entropy(p.float())), error),
        Case(f"one exponential a logit, chunks of {sizes.chunk:,}", chunked(entropy_of_logits), error),
    ]
    return Block(f"entropy, {sizes.tokens:,} x {sizes.vocabulary:,} bf16", sizes.tokens, cases)


def temperature_block(rows: int, sizes: Sizes, device: torch.device) -> Block:
    """Return the block that compares HAPO's temperature with a softmax of the same (rows, vocabulary) logits."""
    logits = random_logits(rows, sizes.vocabulary, device, torch.float32)
    some = slice(None, None, max(rows // 64, 1))
    wide = logits[some].double()
    exact = exact_temperature(wide)
    cases = [
        Case("softmax", lambda: logits.softmax(-1), lambda p: largest_difference(p[some], wide.softmax(-1))),
        Case(
            "adaptive temperature",
            lambda: compute_entropy_based_temperature(logits, **HAPO),
            lambda temperature: largest_difference(temperature[some], exact),
        ),
    ]
    return Block(f"HAPO's decode step, {rows:,} x {sizes.vocabulary:,} float32", rows, cases)


def loss_block(sizes: Sizes, device: torch.device) -> Block:
    """Return the block of losses; raise ImportError where verl, or something that it needs, is not installed."""
    from benchmarks.gpu_losses import loss_batch, loss_functions

    batch = loss_batch(sizes.sequences, sizes.longest, device, torch.float32)
    on_cpu = loss_batch(sizes.sequences, sizes.longest, "cpu", torch.float64)

    def case_of(name: str, loss_and_gradient: Callable) -> Case:
        def error(result: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, ...]:
            pairs = zip(result, loss_and_gradient(on_cpu), strict=True)
            return tuple(((part.cpu().double() - exact).norm() / exact.norm()).item() for part, exact in pairs)

        return Case(name, lambda: loss_and_gradient(batch), error)

    what = f"loss with its gradient, {sizes.sequences} sequences of up to {sizes.longest:,} tokens, jagged"
    return Block(what, batch.tokens, [case_of(*named) for named in loss_functions().items()])


def all_rows(sizes: Sizes, device: torch.device, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows block by block, so that one block's memory is free before the next."""
    builders = {"entropy": entropy_block}
    builders |= {f"HAPO's decode step, {rows:,}": partial(temperature_block, rows) for rows in sizes.decoded_rows}
    builders["HAPO's and AEPO's losses"] = loss_block
    for name, build in builders.items():
        try:
            yield from rows_of(build(sizes, device), device, repeats)
        except ImportError as error:
            yield name, "", f"not measured: verl is not installed ({error})", "", "", "", ""
        except torch.OutOfMemoryError:
            yield name, "", "not measured: its inputs need more memory", "", "", "", ""
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = parser_of(__doc__, device="cuda", repeats=7)
    parser.add_argument("--small", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--output", action="store_true", help="write benchmarks/results/gpu_kernels.md")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; --device cpu --small runs anywhere")
    if args.output and (device.type != "cuda" or args.small):
        parser.error("--output is for a GPU's figures at real sizes")
    torch.manual_seed(0)
    rows = list(all_rows(SMALL if args.small else Sizes(), device, args.repeats))
    what = (
        f"Minimum, median and maximum of {args.repeats} runs after {WARM_UP} to warm up. Memory: peak above the "
        "inputs. Error against float64: the largest difference (entropy in nats, softmax in probability, temperature "
        f"as T'/T); losses: relative, of the value and of the gradient's norm. torch {torch.__version__}."
    )
    if args.output:
        write_report("gpu_kernels", what, HEADER, rows)
    else:
        print(report_text("gpu_kernels", what, HEADER, rows))


if __name__ == "__main__":
    main()
