"""What the watches end a run for: deaths, what Ray does not place, and hangs; and what they must not take for these."""

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
import ray

from tests.configs import composed
from tests.forked import as_in_a_run, ray_of_forks
from tests.fresh import python_for
from verl.trainer import watches
from verl.trainer.checks.resources.cluster import placement_wait
from verl.trainer.watches import PlacementWait, RunWatch, lost_actors, unplaced
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
watches.RunWatch(None, watches.PlacementWait(2, False, 'Take more.')).start()
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
elif victim == "nobody, for want of CPUs":
    ray.get(Runner.options(num_cpus=3).remote().ready.remote())
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
    "victim, message", [("gcs_server", "GCS may have been killed"), ("raylet", "error: Ray's raylet (process ")]
)
def test_ray_ends_a_run_without_its_own_processes(monkeypatch, victim, message):
    """Ray waits 60 s for its GCS if this variable does not say otherwise. The watch names a raylet; Ray does not."""
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


# ---- what Ray does not place ----


def test_an_actor_without_a_place_ends_the_run():
    done = drive(0.2, "nobody, for want of CPUs", 60)
    (error,) = errors(done)
    assert done.returncode == 3 and re.match(
        r"error: Ray has not placed 1 Runner for \d s; free in .* Take more\.", error
    )


JOB, OTHER_JOB = "01000000", "02000000"
WORKER = {"CPU": 3.0, "GPU": 1.0}


def group(count: int, strategy="STRICT_PACK", job=JOB, state="PENDING") -> dict[str, dict]:
    bundles = dict.fromkeys(range(count), WORKER)
    return {f"{'ab' * 14}{job}": {"bundles": bundles, "strategy": strategy, "state": state}}


def test_pending_groups_and_actors_of_this_job_are_named():
    assert unplaced(group(8), {}, JOB) == "24 CPU, 8 GPU on one node"
    assert unplaced(group(8, strategy="PACK"), {}, JOB) == "24 CPU, 8 GPU"
    assert unplaced(group(8, state="CREATED"), {}, JOB) is None
    assert unplaced(group(8, job=OTHER_JOB), {}, JOB) is None
    placed, waiting = {"IPAddress": "10.0.0.1"}, {"IPAddress": ""}
    names = [("verl.x.RewardLoopWorker", waiting)] * 2 + [("WorkerDict", placed), ("Server", waiting)]
    actors = {f"{i}": {"ActorClassName": name, "Address": address} for i, (name, address) in enumerate(names)}
    assert unplaced(group(1), actors, JOB) == "3 CPU, 1 GPU on one node, 2 RewardLoopWorker, 1 Server"
    assert unplaced({}, {"0": actors["2"]}, JOB) is None


def test_a_real_clusters_group_and_actor_are_named(cluster):
    from ray.util.placement_group import placement_group

    large = Member.options(num_cpus=2)
    kept = large.remote(), placement_group([{"CPU": 2}, {"CPU": 3}], strategy="STRICT_PACK")
    expected, end = "5 CPU on one node, 1 Member", time.monotonic() + 30
    while watches.not_placed() != expected and time.monotonic() < end:
        time.sleep(0.2)
    assert watches.not_placed() == expected, kept
    assert watches.free_resources() == "1 of 1 CPU, 0 of 0 GPU"


def wait(limit: float, missing, says_so: bool = False) -> tuple[int, str]:
    """Return the second in which the wait is over, and its text."""
    placement = PlacementWait(limit, says_so, "")
    for second, text in zip(itertools.count(2, 2), missing, strict=False):
        if over := placement.too_long(text, second):
            return second, over
    raise AssertionError("it never ends")


def test_a_wait_ends_after_its_limit_without_a_line(capsys):
    # it looks at 2, 4, …: missing since the first look, 16 s before the last
    assert wait(15, itertools.repeat("8 GPU")) == (18, "Ray has not placed 8 GPU for 16 s")
    assert capsys.readouterr().out == ""


def test_a_placement_in_between_starts_the_wait_anew():
    assert wait(15, itertools.chain(["8 GPU"] * 7, [None], itertools.repeat("8 GPU")))[0] == 2 * (7 + 1) + 18


def test_a_wait_that_says_so_speaks_at_once_and_every_minute(capsys):
    wait(150, itertools.repeat("8 GPU"), says_so=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(", ", 1)[1] for line in lines] == [f"{second} s are over" for second in (2, 62, 122)]
    assert all("waiting for 8 GPU" in line and "150 s (trainer.pending_seconds)" in line for line in lines)


@pytest.mark.parametrize(
    ("setting", "address", "seconds"), [("null", "null", 60), ("null", "auto", 900), (90, "auto", 90), (90, "null", 90)]
)
def test_default_wait_is_longer_in_a_running_cluster(monkeypatch, setting, address, seconds):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    keys = (f"trainer.pending_seconds={setting}", f"++ray_kwargs.ray_init.address={address}")
    wait = placement_wait(composed("grpo_trainer", "hardware=cpu", *keys))
    assert wait.limit == seconds and "num_data_storage_units" in wait.advice
    assert ("ray start --num-cpus" in wait.advice) == (address == "auto")


# ---- hangs ----

PROGRAM = """
import sys, threading, time
from verl.trainer import watches
watches.TASK_RUNNER_SECONDS, watches.START_SECONDS = 0.2, {start}
state = [0]
watch = watches.ProgressWatch(1.0, lambda: state[0], lambda: "; prompts: 2 running", print)
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


def test_time_outside_all_phases_is_watched_too():
    done, _ = run("time.sleep(60)", start_seconds=1)
    assert done.returncode == 4 and "in the phase: start or end of the run" in done.stderr


@pytest.mark.parametrize("report", ['raise ConnectionError("Ray is gone")', "time.sleep(60)"])
def test_a_report_that_fails_or_hangs_does_not_keep_the_process_alive(report):
    done, seconds = run(REPORT_FAILS.replace('raise ConnectionError("Ray is gone")', report))
    said = "the driver was not told: ConnectionError('Ray is gone')" if "raise" in report else "in the phase: rollout"
    assert done.returncode == 4 and said in done.stderr and seconds < 40
