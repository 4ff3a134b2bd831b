"""The check of a machine that has a GPU, torch and transformers only; its parts are benchmarks with their own tests."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/check_gpu/check_gpu_bare.py"
bare = runpy.run_path(str(SCRIPT))

WITHOUT_PLUGIN = """
import runpy, sys
from pathlib import Path
main = runpy.run_path(sys.argv[1])["main"]
modules = ("benchmarks.gpu_losses", "benchmarks.shared_gradients --help")
main.__globals__["PARTS"] = [(module, 120, module, "") for module in modules]
sys.exit(main(Path(sys.argv[2])))
"""


def test_a_part_that_fails_or_lasts_too_long_is_recorded(capsys):
    failed = bare["run_part"]("none", 60, "no_such_module_at_all")
    assert failed["code"] == 1 and failed["tables"] == []
    late = bare["run_part"]("late", 1, "http.server 0 --bind 127.0.0.1")
    assert late["code"] == 124 and late["seconds"] >= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the parts would run")
def test_without_a_gpu_it_says_so(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "SMALL"}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 3 and "torch sees no GPU" in done.stderr and not list(tmp_path.iterdir())


def test_the_limits_stay_below_eight_minutes():
    assert sum(seconds for _, seconds, *_ in bare["PARTS"]) <= 480


@pytest.mark.slow
def test_the_figures_are_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SMALL", "1")
    main = bare["main"]
    monkeypatch.setitem(main.__globals__, "PARTS", [part for part in bare["PARTS"] if part[0] == "gradients"])
    assert main(tmp_path / "figures.json") == 0
    assert "TRITON_INTERPRET" not in os.environ, "the test that compiles the kernel cannot do so in the interpreter"
    figures = json.loads((tmp_path / "figures.json").read_text())
    (part,) = figures["parts"]
    assert part["name"] == "gradients" and [row[0] for row in part["tables"][0]] == ["way", "exact", "rows", "tree"]
    assert figures["gpu"] is None and figures["torch"] == torch.__version__


@pytest.mark.slow
def test_verl_may_be_installed_without_this_project(tmp_path):
    """Then verl finds no entry point of this project, and its own package hides the folder `verl/`."""
    environment = os.environ | {"SMALL": "1", "VERL_USE_EXTERNAL_PLUGINS": "none", "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, "-c", WITHOUT_PLUGIN, str(SCRIPT), str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
