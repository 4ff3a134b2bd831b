"""The watch of a run's progress, in a process of its own, which it ends."""

import subprocess
import time

import pytest

from tests.fresh import python_for

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, threading, time
from verl.trainer import progress_watch
progress_watch.END_SECONDS, progress_watch.START_SECONDS = 0.2, {start}
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
time.sleep(2)  # without a phase the run starts or ends
with watch.phase("start of the workers", at_least=60):
    time.sleep(2)
"""
REPORT_FAILS = """
def fail(message):
    raise ConnectionError("Ray is gone")
watch._report = fail
with watch.phase("rollout"):
    time.sleep(60)
"""


def run(work: str, start_seconds: float = 60) -> tuple[subprocess.CompletedProcess, float]:
    started = time.monotonic()
    program = PROGRAM.format(work=work, start=start_seconds)
    done = subprocess.run(python_for(program), capture_output=True, text=True, timeout=100)
    return done, time.monotonic() - started


def test_a_phase_that_hangs_ends_the_run_by_its_name():
    done, seconds = run(HANGS)
    message = "no progress for 1 s (trainer.progress_timeout) in the phase: rollout (step 3); prompts: 2 running"
    assert done.returncode == 4 and f"error: {message}" in done.stderr and message in done.stdout and seconds < 40


def test_a_run_that_goes_on_is_left_alone():
    done, _ = run(GOES_ON)
    assert done.returncode == 0 and "ENDED BY ITSELF" in done.stdout and done.stderr == ""


def test_what_has_no_phase_is_watched_too():
    done, _ = run("time.sleep(60)", start_seconds=1)
    assert done.returncode == 4 and "in the phase: start or end of the run" in done.stderr


def test_a_report_that_fails_does_not_keep_the_process_alive():
    done, _ = run(REPORT_FAILS)
    assert done.returncode == 4 and "the driver was not told: ConnectionError('Ray is gone')" in done.stderr


def test_a_report_that_hangs_does_not_keep_the_process_alive():
    done, seconds = run(REPORT_FAILS.replace('raise ConnectionError("Ray is gone")', "time.sleep(60)"))
    assert done.returncode == 4 and "in the phase: rollout" in done.stderr and seconds < 40
