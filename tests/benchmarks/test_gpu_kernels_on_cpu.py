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


def measured(*arguments: str) -> dict[str, list[str]]:
    """Run the benchmark as `python -m` does it, without most modules; return case -> other cells of its last row."""
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({ABSENT!r})); {NO_UPSTREAM}"
        f"sys.argv[1:] = {list(arguments)!r}; "
        "runpy.run_module('benchmarks.gpu_kernels', run_name='__main__', alter_sys=True)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return {case: cells for _, case, *cells in lines[2:]}


def check(rows: dict[str, list[str]], tolerance: int = 1) -> None:
    assert len(rows) == len(BOUNDS)
    for case, (milliseconds, ratio, _, error) in rows.items():
        median, least, most = map(float, re.findall(r"[\d.]+", milliseconds))
        assert 0 < least <= median <= most and float(ratio) > 0, case
        low, high = next(bounds for pattern, bounds in BOUNDS.items() if re.fullmatch(pattern, case))
        assert low <= float(error) <= tolerance * high, (case, error)


def test_errors_of_small_sizes():
    check(measured("--device", "cpu", "--small", "--repeats", "2"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_errors_of_the_real_sizes_on_a_gpu():
    check(measured("--repeats", "3"), tolerance=10)  # 152,064 terms instead of 1,000 are summed up
