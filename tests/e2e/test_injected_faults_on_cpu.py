"""A process of a run raises, hangs or returns nonsense, and the run ends with the first cause."""

import re
import subprocess

import pytest

from tests.e2e.runs import AS_TYPED, NO_TOKEN, NO_VALIDATION, logged_steps, process_tree, start_run, wait_until

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


@pytest.mark.parametrize("fault, cause", CAUSES.items())
def test_a_fault_ends_the_run_with_its_cause(inputs, fault, cause):
    name = re.sub(r"\W+", "_", fault)
    file = inputs / f"{name}.fault"
    environment = {"FAULT": fault, "FAULT_FILE": str(file), "VERL_USE_EXTERNAL_MODULES": "injected_faults"}
    launcher = start_run(inputs, name, *SETTINGS, **AS_TYPED, **NO_TOKEN, **environment)
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
