"""The benchmark that calls the trainer's own methods still finds them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_quick_run_ends_with_a_table():
    env = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.hato_driver", "--quick"]
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    for part in ("driver, sum", "rollout, sum", "selection", "share_nodes"):
        assert part in told.stdout
