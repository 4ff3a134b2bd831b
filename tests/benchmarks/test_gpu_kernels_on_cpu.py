"""benchmarks/gpu_kernels.py needs torch only, and its errors are those of the number's format."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# the repository's verl/ without upstream's package, as Python sees it where only the repository lies
NO_UPSTREAM = "import types; sys.modules['verl'] = types.ModuleType('verl'); sys.modules['verl'].__path__ = ['verl']; "
ABSENT = tuple("transformers vllm ray tensordict hydra omegaconf psutil pandas pyarrow flash_attn".split())
# case -> from and to where its error against float64 must lie: bfloat16 has 8 bits, float32 24
BFLOAT16, FLOAT32 = (1e-4, 1.0), (0.0, 1e-4)
BOUNDS = {
    r"softmax, at once in bf16": BFLOAT16,
    r"softmax, float32 in chunks of [\d,]+": FLOAT32,
    r"one exponential a logit, chunks of [\d,]+": FLOAT32,
    r"softmax": FLOAT32,
    r"adaptive temperature": FLOAT32,
}
# HAPO's advantage jumps where a ratio passes a bound: of two million tokens some pass it in one format only
LOSSES = {"vanilla": FLOAT32, "hapo": (0.0, 1e-3), "aepo": FLOAT32}


def table_of(*arguments: str, absent: tuple[str, ...] = ()) -> list[list[str]]:
    """The benchmark's rows, run as `python -m` does it, with modules that cannot be imported."""
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({absent!r})); {NO_UPSTREAM if absent else ''}"
        f"sys.argv[1:] = {list(arguments)!r}; "
        "runpy.run_module('benchmarks.gpu_kernels', run_name='__main__', alter_sys=True)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert lines[0] == ["what", "case", "ms: min / median / max", "times the baseline", "peak MiB", "tokens/s", "error"]
    return lines[2:]


def check(row: list[str], bounds: tuple[float, float]) -> None:
    _, case, milliseconds, ratio, _, tokens, error = row
    fastest, median, slowest = (float(number.replace(",", "")) for number in milliseconds.split(" / "))
    assert 0 < fastest <= median <= slowest and float(tokens.replace(",", "")) > 0, row
    assert ratio == "baseline" or float(ratio) > 0, row
    assert all(bounds[0] <= float(number) <= bounds[1] for number in error.split(" / ")), (case, error)


def bounds_of(case: str, bounds: dict[str, tuple[float, float]]) -> tuple[float, float]:
    return next(of for pattern, of in bounds.items() if re.fullmatch(pattern, case))


def test_torch_suffices():
    rows = table_of("--device", "cpu", "--small", "--repeats", "2", absent=ABSENT)
    losses = [row for row in rows if "losses" in row[0]]
    assert len(losses) == 1 and "not measured: verl is not installed" in losses[0][2]
    measured = [row for row in rows if row not in losses]
    # two sizes of the decode step
    assert len(measured) == len(BOUNDS) + 2
    for row in measured:
        check(row, bounds_of(row[1], BOUNDS))


def test_the_losses_are_measured_where_verl_is():
    rows = table_of("--device", "cpu", "--small", "--repeats", "1")
    measured = {row[1]: row for row in rows if row[1] in LOSSES}
    assert list(measured) == list(LOSSES)
    for case, row in measured.items():
        check(row, LOSSES[case])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_real_sizes_on_a_gpu():
    """A case that does not fit into a smaller GPU says so; what is measured is as exact as its dtype."""
    rows = table_of("--repeats", "3")
    measured = [row for row in rows if "memory" not in row[2] and "not measured" not in row[2]]
    assert {row[1] for row in measured} >= {"softmax", "adaptive temperature"}
    for row in measured:
        assert float(row[4].replace(",", "")) >= 0
        # 152,064 terms instead of 1,000 are summed up
        low, high = bounds_of(row[1], BOUNDS | LOSSES)
        check(row, (low, 10 * high))
