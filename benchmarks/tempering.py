"""Compares time and error of HAPO's adaptive temperature in vLLM's V2 sampler: the Triton kernel against torch.

    python -m benchmarks.tempering                                      # a machine with a GPU; needs torch and Triton
    TRITON_INTERPRET=1 python -m benchmarks.tempering --device cpu --rows 4 --vocabulary 5000   # does it run at all?

Both ways divide all rows of float32 logits by T' = 1 + temperature_tau h in place, in turns. The baseline is the torch
code of the V1 runner's logits processor. The error is the largest difference of T' to float64.
"""

import statistics

import torch

from benchmarks.gpu_kernels import HAPO, exact_temperature, random_logits, timed
from benchmarks.report import in_turns, parser_of, with_range
from vllm_patches.entropy_temperature import compute_entropy_based_temperature
from vllm_patches.tempered_requests import SETTINGS
from vllm_patches.tempering_kernel import divide_by_temperature

EXACT_ROWS = 64


def compare(rows: int, vocabulary: int, device: torch.device, runs: int) -> list[tuple[str, ...]]:
    """Return a line of the table for each way."""
    logits = random_logits(rows, vocabulary, device, torch.float32)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    ones = torch.ones(rows, device=device)
    settings = torch.tensor([HAPO[name] for name in SETTINGS], device=device).repeat(rows, 1)
    work = torch.empty_like(logits)

    def by_torch(values: torch.Tensor) -> None:
        values.div_(compute_entropy_based_temperature(values, **HAPO).unsqueeze(-1))

    def by_kernel(values: torch.Tensor) -> None:
        divide_by_temperature(values, slots, ones, settings)

    def run(way):
        def once(_: int) -> float:
            work.copy_(logits)
            return timed(lambda: way(work), device)[0]

        return once

    ways = {"torch (baseline)": by_torch, "Triton kernel": by_kernel}
    times = {name: values[2:] for name, values in in_turns({k: run(w) for k, w in ways.items()}, runs + 2).items()}
    baseline, exact, lines = statistics.median(times["torch (baseline)"]), exact_temperature(logits[:EXACT_ROWS]), []
    for name, way in ways.items():
        work.copy_(logits)
        way(work)
        column = logits[:EXACT_ROWS].abs().argmax(-1, keepdim=True)
        divisor = logits[:EXACT_ROWS].gather(1, column).double() / work[:EXACT_ROWS].gather(1, column).double()
        error = float((divisor.squeeze(1) - exact).abs().max())
        speed = baseline / statistics.median(times[name])
        lines.append((f"{rows} x {vocabulary}", name, with_range(times[name], ".3f"), f"{speed:.2f}", f"{error:.1e}"))
    return lines


def main() -> None:
    parser = parser_of(__doc__, device="cuda", runs=20, vocabulary=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    args = parser.parse_args()
    torch.manual_seed(0)
    print("| logits | way | ms: median (least to most) | times as fast | error |\n| --- | --- | --- | --- | --- |")
    for rows in args.rows:
        for line in compare(rows, args.vocabulary, torch.device(args.device), args.runs):
            print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
