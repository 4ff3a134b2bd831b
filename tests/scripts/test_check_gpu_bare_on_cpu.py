"""The check of a machine that has a GPU, torch and transformers only; its parts are benchmarks with their own tests."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.packages import TRITON, unpacked

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the parts would run")
def test_without_a_gpu_it_says_so():
    done = subprocess.run(["bash", "scripts/check_gpu/check_gpu_bare.sh"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and "torch sees no GPU" in done.stderr


# a `python` for the script: it sees no packages but those of the test, says that there is a GPU, and only imports parts
SHIM = """#!/bin/sh
case "$*" in
*cuda.is_available*) exit 0 ;;
"-m benchmarks"*) set -- -m "$2" --help ;;
esac
exec {python} -S "$@"
"""


@pytest.mark.slow
def test_verl_may_be_installed_without_this_project(tmp_path):
    """Then verl finds no entry point of this project, and its own package hides the folder `verl/`."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix != ".pth" and not path.name.startswith("verl_exploration_recipes"):
            (packages / path.name).symlink_to(path)
    (tmp_path / "python").write_text(SHIM.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_USE_EXTERNAL")}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{packages}:{unpacked(TRITON)}"}
    environment |= {"VERL_PLATFORM": "cpu", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        ["bash", "scripts/check_gpu/check_gpu_bare.sh"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("usage: ") == 4 and "failed parts: none" in done.stdout
