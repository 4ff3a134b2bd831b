"""The check of a machine that has a GPU, torch and transformers only; its parts are benchmarks with their own tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the parts would run")
def test_without_a_gpu_it_says_so():
    done = subprocess.run(["bash", "scripts/check_gpu/check_gpu_bare.sh"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and "torch sees no GPU" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["benchmarks.gpu_losses", "benchmarks.shared_gradients"])
def test_verl_may_be_installed_without_this_project(module):
    """Then verl finds no entry point of this project, and its own package hides the folder `verl/`."""
    environment = {"PYTHONPATH": str(ROOT), "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    environment |= {"VERL_USE_EXTERNAL_MODULES": "verl_patches.plugin", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
