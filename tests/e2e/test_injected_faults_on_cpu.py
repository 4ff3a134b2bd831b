"""A process of a run raises, hangs or returns nonsense, and the run ends with the first cause.

All of them by hand, in half an hour, which prints what docs/failures.md sums up:

    INJECT=all python -m pytest -s tests/e2e/test_injected_faults_on_cpu.py

Without `INJECT` those run that no other test's fault resembles: an engine that does not take weights, or whose weights
are NaN, an update that makes a weight infinite, gradients that are NaN, and a reward function that hangs.
"""

import os
import re
import subprocess
import time

import pytest

from tests.e2e.injected_faults import PLACES
from tests.e2e.runs import AS_TYPED, NO_TOKEN, NO_VALIDATION, logged_steps, process_tree, start_run, wait_until

pytestmark = pytest.mark.e2e

HOWS = ("raises", "hangs", "returns nonsense")
CHOSEN = [
    ("vLLM's engine, new weights", "raises"),
    ("vLLM's engine, values of the weights", "returns nonsense"),
    ("FSDP worker, values of the weights", "returns nonsense"),
    ("FSDP worker, gradients", "returns nonsense"),
    ("reward function", "hangs"),
]
if os.environ.get("INJECT") == "all":
    CHOSEN = [(place, how) for place in PLACES for how in HOWS]
elif os.environ.get("INJECT"):
    CHOSEN = [tuple(pair.split(":")) for pair in os.environ["INJECT"].split(";")]
PROGRESS_SECONDS = 30
SETTINGS = ["trainer.save_freq=2", *NO_VALIDATION, "trainer.total_training_steps=1000"]
SETTINGS += [f"trainer.progress_timeout={PROGRESS_SECONDS}"]


@pytest.mark.parametrize("place, how", CHOSEN)
def test_a_fault_ends_the_run_with_its_cause(inputs, place, how):
    name = re.sub(r"\W+", "_", f"{place} {how}")
    file = inputs / f"{name}.fault"
    fault = {"FAULT": place, "FAULT_HOW": how, "FAULT_FILE": str(file), "VERL_USE_EXTERNAL_MODULES": "injected_faults"}
    launcher = start_run(inputs, name, *SETTINGS, **AS_TYPED, **NO_TOKEN, **fault)
    wait_until(lambda: len(logged_steps(inputs / name)) > 0, launcher)
    tree = process_tree(launcher)
    file.touch()
    started = time.monotonic()
    try:
        _, errors = launcher.communicate(timeout=PROGRESS_SECONDS + 120)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        _, errors = launcher.communicate(timeout=60)
        pytest.fail(f"{place} {how}: the run went on for {time.monotonic() - started:.0f} s\n{errors[-3000:]}")
    seconds = time.monotonic() - started
    error = "; ".join(line.strip() for line in errors.splitlines() if line.strip().startswith("error:"))
    print(f"\n| {place} | {how} | {seconds:.0f} | {launcher.returncode} | {error[:500]} |")
    assert launcher.returncode != 0
    assert not [process for process in tree if process.is_running()]
    causes = {"raises": "injected fault", "hangs": "no progress|gave no answer|group_timeout", "returns nonsense": "."}
    assert re.search(causes[how], error), errors[-3000:]
