"""Tests of the watches, which end a run for deaths and hangs, and must not mistake other events for these."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
import ray

from tests.forked import as_in_a_run, ray_of_forks
from tests.fresh import python_for
from verl.trainer import watches
from verl.trainer.watches import RunWatch, lost_actors
from verl.utils.fault_reports import cause_of

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0)
class Member:
    """An actor of a run."""

    def pid(self) -> int:
        return os.getpid()

    def fail(self, first: "Member | None" = None) -> None:
        if first is None:
            raise KeyError("answer")
        ray.get(first.fail.remote())

    def leave(self) -> None:
        ray.actor.exit_actor()


@pytest.fixture(scope="module")
def cluster():
    with ray_of_forks(num_cpus=1, object_store_memory=10**8):
        yield


def soon(look: Callable[[], list[str]]) -> list[str]:
    end = time.monotonic() + 60
    while not (seen := look()) and time.monotonic() < end:
        time.sleep(0.2)
    return seen


def test_actors_that_died_are_named_and_those_that_were_ended_are_not(cluster):
    victim, killed, left, dropped = (Member.remote() for _ in range(4))
    pid, *_ = ray.get([member.pid.remote() for member in (victim, killed, left, dropped)])
    assert lost_actors() == []
    ray.kill(killed)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(left.leave.remote())
    del dropped
    os.kill(pid, signal.SIGKILL)
    (lost,) = soon(lost_actors)
    assert f"Member (process {pid} on " in lost
    time.sleep(1)  # the others have ended by now
    assert len(lost_actors()) == 1


def test_the_cause_of_a_failure_ends_with_the_process_in_which_it_was_raised(cluster):
    outer, inner = Member.remote(), Member.remote()
    pid, node = ray.get(inner.pid.remote()), ray.util.get_node_ip_address()
    for call in (inner.fail.remote(), outer.fail.remote(inner)):
        with pytest.raises(KeyError) as raised:
            ray.get(call)
        assert cause_of(raised.value) == f"KeyError: 'answer' (raised in Member, process {pid} on {node})"
    assert cause_of(ValueError("a\n  b")) == "ValueError: a b"


DRIVER = """
import os, signal, sys, time
import ray
from verl.trainer import watches
watches.LOOK_SECONDS, watches.END_SECONDS = float(sys.argv[1]), float(sys.argv[2])
watches.RunWatch().start()
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=10**8)

@ray.remote(num_cpus=0)
class Runner:
    def run(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def ready(self):
        pass

    def wait(self):
        time.sleep(600)

victim, seconds = sys.argv[3:]
if victim == "Runner":
    ray.get(Runner.remote().run.remote())
elif victim == "Runner, by Ray":
    ray.get(Runner.remote().wait.remote())
elif victim:
    runner = Runner.remote()
    ray.get(runner.ready.remote())
    ray._private.worker.global_worker.node.all_processes[victim][0].process.kill()
    ray.get(runner.wait.remote())
time.sleep(float(seconds))
"""


def drive(look_seconds: float, victim: str, seconds: float, end_seconds: float = 3) -> subprocess.CompletedProcess:
    """Run a driver that ends by itself after `seconds`, if not by the death of its victim. The watch looks every
    `look_seconds`, and ends the driver `end_seconds` after its message."""
    command = ["python", "-c", DRIVER, str(look_seconds), str(end_seconds), victim, str(seconds)]
    return subprocess.run(command, env=as_in_a_run(os.environ), capture_output=True, text=True, timeout=120)


def errors(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


@pytest.mark.parametrize(
    "victim, message", [("gcs_server", "GCS may have been killed"), ("raylet", "node has crashed")]
)
def test_ray_ends_a_run_without_its_own_processes(monkeypatch, victim, message):
    """Ray waits 60 s for its GCS if this variable does not say otherwise."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    done = drive(0.2, victim, 600)
    assert done.returncode != 0 and message in done.stderr


def test_a_driver_that_ends_by_itself_still_says_who_died():
    # on a busy machine Ray takes more than 3 s to shut down, and the watch would end the driver first
    done = drive(100, "Runner", 60, end_seconds=90)
    assert done.returncode == 1 and "ActorDiedError" in done.stderr
    assert errors(done)[0].startswith("error: Runner (process ")


def test_an_actor_that_ray_killed_for_its_memory_is_named_as_such(monkeypatch):
    """Ray's limit is one percent of the memory, which any run exceeds."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    done = drive(0.2, "Runner, by Ray", 60, end_seconds=90)
    assert done.returncode == 1 and "OutOfMemoryError" in done.stderr
    message = r"error: Runner \(process \d+ on .*\) was killed by Ray, because the memory of its node ran out \("
    assert re.match(message + r"[\d.]+GB used / [\d.]+GB limit\)", errors(done)[0])


def test_a_run_that_ends_well_says_nothing():
    done = drive(0.05, "", 2)
    assert done.returncode == 0 and errors(done) == []


def test_a_death_is_told_once(monkeypatch, capsys):
    watch = RunWatch()
    monkeypatch.setattr(watches, "lost_actors", lambda: ["a died"])
    watch.look()
    watch.look()
    assert capsys.readouterr().err.count("error: a died") == 1 and watch.faults == ["a died"]
    watch.ending.set()


# ---- hangs ----

PROGRAM = """
import sys, threading, time
from verl.trainer import watches
watches.TASK_RUNNER_SECONDS, watches.START_SECONDS = 0.2, {start}
state = [0]
watch = watches.ProgressWatch(1.0, lambda: state[0], lambda message: print(message, flush=True))
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
    {report}
watch._report = fail
with watch.phase("rollout"):
    time.sleep(60)
"""


def run(work: str, start_seconds: float = 60) -> tuple[subprocess.CompletedProcess, float]:
    started = time.monotonic()
    program = PROGRAM.format(work=work, start=start_seconds)
    done = subprocess.run(python_for(program), capture_output=True, text=True, timeout=100)
    return done, time.monotonic() - started


@pytest.mark.parametrize(
    ("work", "start_seconds", "phase"),
    [(HANGS, 60, "rollout (step 3)"), ("time.sleep(60)", 1, "start or end of the run")],
)
def test_a_phase_that_hangs_ends_the_run_by_its_name(work, start_seconds, phase):
    done, seconds = run(work, start_seconds)
    message = f"no progress for 1 s (trainer.progress_timeout) in the phase: {phase}"
    assert done.returncode == 4 and f"error: {message}" in done.stderr and message in done.stdout and seconds < 40


def test_a_run_that_goes_on_is_left_alone():
    done, _ = run(GOES_ON)
    assert done.returncode == 0 and "ENDED BY ITSELF" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("report", ['raise ConnectionError("Ray is gone")', "time.sleep(60)"])
def test_a_report_that_fails_or_hangs_does_not_keep_the_process_alive(report):
    done, seconds = run(REPORT_FAILS.format(report=report))
    said = "the driver was not told: ConnectionError('Ray is gone')" if "raise" in report else "in the phase: rollout"
    assert done.returncode == 4 and said in done.stderr and seconds < 40
