"""A process of a run raises, hangs or returns nonsense, and the run ends with the first cause."""

import os
import re
import subprocess
import sys

import pytest

from tests.e2e.runs import NO_TOKEN, NO_VALIDATION, ROOT, logged_steps, process_tree, start_run, wait_until
from tests.forked import CPU, MODULES, READ, fork_server

pytestmark = pytest.mark.e2e

# fault, none of which another test's resembles -> what the error says
CAUSES = {
    "vLLM's engine takes no weights": "injected fault",
    "vLLM's engine has weights of NaN": ".",
    "an update makes a weight infinite": ".",
    "gradients are NaN": ".",
    "reward function hangs": "no progress|gave no answer|group_timeout",
}
PROGRESS_SECONDS = 30
SETTINGS = ["trainer.save_freq=2", *NO_VALIDATION, "trainer.total_training_steps=1000"]
SETTINGS += [f"trainer.progress_timeout={PROGRESS_SECONDS}"]


@pytest.fixture(scope="module")
def forks():
    """The environment of runs whose processes are forks of one that has imported the faults with verl."""
    imported = {"VERL_USE_EXTERNAL_MODULES": "injected_faults", "PYTHONPATH": f"{ROOT}/tests/e2e"}
    imported |= {**dict(zip(READ, CPU, strict=True)), "VIRTUAL_ENV": sys.prefix}
    server, lifeline = fork_server.start(None, MODULES, os.environ | imported)
    yield imported | server | {"PATH": f"{fork_server.CLIENT.parent}:{os.environ['PATH']}"}
    os.close(lifeline)


@pytest.mark.parametrize("fault, cause", CAUSES.items())
def test_a_fault_ends_the_run_with_its_cause(inputs, forks, fault, cause):
    name = re.sub(r"\W+", "_", fault)
    file = inputs / f"{name}.fault"
    launcher = start_run(inputs, name, *SETTINGS, **forks, **NO_TOKEN, FAULT=fault, FAULT_FILE=str(file))
    wait_until(lambda: len(logged_steps(inputs / name)) > 0, launcher)
    tree = process_tree(launcher)
    file.touch()
    try:
        _, errors = launcher.communicate(timeout=PROGRESS_SECONDS + 120)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        _, errors = launcher.communicate(timeout=60)
        pytest.fail(f"{fault}: the run goes on\n{errors[-3000:]}")
    error = "; ".join(line.strip() for line in errors.splitlines() if line.strip().startswith("error:"))
    assert launcher.returncode != 0
    assert not [process for process in tree if process.is_running()]
    assert re.search(cause, error), errors[-3000:]
