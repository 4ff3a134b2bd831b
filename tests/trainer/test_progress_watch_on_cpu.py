"""The watch of a run's progress, in a process of its own, which it ends."""

import subprocess
import sys
import time

import pytest

from tests.fresh import python_for

PROGRAM = """
import sys, threading, time
from verl.trainer import progress_watch
progress_watch.END_SECONDS = 0.2
state = [0]
watch = progress_watch.ProgressWatch(1.0, lambda: state[0], lambda: "; prompts: 2 running", print)
watch.start()
{work}
print("ENDED BY ITSELF")
"""
HANGS = """
with watch.phase("rollout (step 3)"):
    with watch.phase("update of the actor (step 3)"):
        time.sleep(0.3)
    time.sleep(60)
"""
GOES_ON = """
with watch.phase("rollout (step 3)"):
    for state[0] in range(6):
        time.sleep(0.5)
for step in range(6):
    with watch.phase(f"step {step}"):
        time.sleep(0.5)
time.sleep(2)  # between phases it does not look: nothing has begun, or all has ended
"""
ENDED = """
watch.end()
with watch.phase("never"):
    time.sleep(2)
"""


def run(work: str) -> tuple[subprocess.CompletedProcess, float]:
    started = time.monotonic()
    done = subprocess.run(python_for(PROGRAM.format(work=work)), capture_output=True, text=True, timeout=100)
    return done, time.monotonic() - started


@pytest.mark.slow
def test_a_phase_that_hangs_ends_the_run_by_its_name():
    done, seconds = run(HANGS)
    message = "no progress for 1 s (trainer.progress_timeout) in the phase: rollout (step 3); prompts: 2 running"
    assert done.returncode == 4 and f"error: {message}" in done.stderr and message in done.stdout and seconds < 40


@pytest.mark.slow
@pytest.mark.parametrize("work", [GOES_ON, ENDED])
def test_a_run_that_goes_on_is_left_alone(work):
    done, _ = run(work)
    assert done.returncode == 0 and "ENDED BY ITSELF" in done.stdout and done.stderr == "", sys.executable
