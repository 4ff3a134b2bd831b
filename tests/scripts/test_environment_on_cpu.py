"""Tests of the choice of a script's Python, and of what several runs make only once.

GPU runs do not use the CPU stack's .venv: their Python may be a container's.
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout with a .venv as scripts/setup.sh makes it, and, on the PATH, another Python that has vLLM."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (tmp_path / ".venv/installed-from").touch()
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    other = tmp_path / "container/python"
    other.parent.mkdir()
    other.write_text(f'#!/bin/bash\nPYTHONPATH={tmp_path}/packages exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    (tmp_path / "packages/vllm").mkdir(parents=True)
    (tmp_path / "packages/vllm/__init__.py").touch()
    return tmp_path


def chosen(checkout: Path, hardware: str, **environment: str) -> subprocess.CompletedProcess:
    """`python` on the PATH after `use_hardware`, and the suffix of names."""
    command = (
        f'source scripts/environment.sh; use_hardware {hardware}; command -v python; echo "suffix=$HARDWARE_SUFFIX"'
    )
    env = {"PATH": f"{checkout}/container:/usr/bin:/bin"} | environment
    return subprocess.run(["bash", "-euc", command], cwd=checkout, env=env, capture_output=True, text=True)


def test_a_gpu_run_leaves_the_cpu_stacks_environment_alone(checkout):
    assert chosen(checkout, "cpu").stdout.split() == [f"{checkout}/.venv/bin/python", "suffix="]
    assert chosen(checkout, "gpu").stdout.split() == [f"{checkout}/container/python", "suffix=_gpu"]
    (checkout / ".venv/installed-from").unlink()  # a .venv that somebody made for GPUs
    (checkout / "packages/vllm/__init__.py").unlink()
    (checkout / "packages/vllm").rmdir()
    assert "error" in chosen(checkout, "gpu").stderr and str(checkout / ".venv") in chosen(checkout, "gpu").stderr


def test_a_dry_run_may_check_the_config_in_it(checkout):
    result = chosen(checkout, "gpu", DRY_RUN="1")
    assert f"{checkout}/.venv/bin/python has no vllm" in result.stderr and result.returncode == 2


def test_an_active_environment_wins(checkout):
    assert chosen(checkout, "gpu", VIRTUAL_ENV="/somewhere").stdout.split()[0] == f"{checkout}/container/python"


def test_a_python_without_vllm_is_named(checkout):
    (checkout / "container/python").write_text(f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')
    result = chosen(checkout, "gpu")
    assert result.returncode == 2 and f"{checkout}/container/python has no vllm" in result.stderr


MAKE = (
    f"set -e; source {ROOT}/scripts/environment.sh; "
    "make_once made bash -c 'sleep 0.3; echo once >> log; mkdir made'; test -d made"
)


def bash(script: str, folder: Path, **options) -> subprocess.Popen:
    return subprocess.Popen(["bash", "-c", script], cwd=folder, **options)


def test_of_runs_that_begin_together_one_makes_and_the_others_wait(tmp_path):
    slow = MAKE.replace("sleep 0.3", "until [ -e go ]; do sleep 0.05; done")
    errors = [tmp_path / f"errors{i}" for i in range(3)]
    runs = [bash(f"exec 2>{error}; {slow}", tmp_path) for error in errors]
    deadline = time.monotonic() + 30
    while sum("waiting for another run" in error.read_text() for error in errors if error.exists()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "go").touch()
    assert [run.wait(30) for run in runs] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "once\n"
    assert bash(MAKE.replace("echo once", "false"), tmp_path).wait(30) == 0, "what is there is not made again"


def test_a_failure_ends_the_run_and_the_next_tries_again(tmp_path):
    assert bash(MAKE.replace("mkdir made", "false"), tmp_path).wait(30) == 1
    assert bash(MAKE, tmp_path).wait(30) == 0


def test_a_dry_run_makes_nothing(tmp_path):
    assert bash(MAKE.replace("test -d made", "test ! -e made"), tmp_path, env={"DRY_RUN": "1"}).wait(30) == 0
    assert list(tmp_path.iterdir()) == []


SFT = (
    f"set -euo pipefail; source {ROOT}/scripts/environment.sh; RUN_DIR=$PWD/run PROCESSES=1\n"
    "python() { %s; }\ntrain_sft key=value"
)


def test_a_trained_model_takes_the_place_of_the_one_before_only_when_it_is_there(tmp_path):
    model = tmp_path / "run/huggingface"
    model.mkdir(parents=True)
    (model / "old").touch()
    assert bash(SFT % "return 3", tmp_path).wait(30) == 3 and (model / "old").exists()
    made = 'mkdir -p run/global_step_2/huggingface; echo "$*" > run/global_step_2/huggingface/new'
    assert bash(SFT % f"{made}; echo 2 > run/latest_checkpointed_iteration.txt", tmp_path).wait(30) == 0
    assert [path.name for path in model.iterdir()] == ["new"] and "key=value" in (model / "new").read_text()


def test_a_signal_to_the_script_ends_the_training(tmp_path):
    script = bash(SFT % "echo $BASHPID > pid; exec sleep 60", tmp_path)
    deadline = time.monotonic() + 30
    while not (pid := tmp_path / "pid").exists() or not pid.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    script.terminate()
    assert script.wait(10) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
