"""SIGKILL of a run's processes, one kind after the other: the run ends soon, names the process, leaves nothing behind,
and the same command goes on from the last complete checkpoint. Each launch goes on where the one before it was killed.

Two kinds are killed here. The others are noticed in the same ways; they are tried by hand, each with a launch of one to
three minutes:

    FAULTS=all python -m pytest -s tests/e2e/test_faults_on_cpu.py
"""

import json
import os
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import start_run, wait_until
from verl.trainer.checkpoint_marker import complete_steps

pytestmark = pytest.mark.e2e

# kind -> pattern of the process's command line
TESTED = {
    # an actor that nobody calls through Ray: upstream would wait forever
    "TransferQueue's storage": "ray::SimpleStorageUnit",
    # without it no state of an actor can be asked for
    "GCS": "gcs/gcs_server",
}
# tests of GRPO, HATO and several workers kill a driver, a worker and an engine core as well
KINDS = TESTED | {
    "driver": r"-m verl\.trainer\.main_ppo",
    "TransferQueue's controller": "ray::TransferQueueController",
    "TaskRunner": "ray::TaskRunner",
    "FSDP worker": "ray::WorkerDict",
    "vLLM's server": r"ray::(vLLMHttp|Candidate)Server",
    "vLLM's engine core": "VLLM::EngineCore",
    "agent-loop worker": r"ray::\w*AgentLoopWorker",
    "reward-loop worker": "ray::RewardLoopWorker",
    "load balancer": "ray::GlobalRequestLoadBalancer",
    "raylet": "raylet/raylet ",
    "Ray's agent of the dashboard": "ray::DashboardAgent",
    "Ray's agent of environments": "ray::RuntimeEnvAgent",
    "fork server": "fork_server.py --serve",
    "launcher": "",
}
# the run goes on without them
DISPENSABLE = ("_private/monitor.py", "dashboard/dashboard.py", "_private/log_monitor.py")
chosen = os.environ.get("FAULTS", "")
CHOSEN = list(TESTED) if not chosen else list(KINDS) if chosen == "all" else chosen.split(",")
SETTINGS = ["trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false"]


@dataclass(frozen=True)
class End:
    """How a run ended after a SIGKILL."""

    seconds: float
    code: int
    errors: str  # what the launcher printed
    pid: int  # of the victim
    left: list[str]  # processes and files in shared memory


def process_tree(launcher: subprocess.Popen) -> dict[psutil.Process, str]:
    """The launcher and its descendants, with their command lines."""
    commands = {}
    root = psutil.Process(launcher.pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            commands[process] = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
    return commands


def shared_memory(processes: dict[psutil.Process, str]) -> set[int]:
    """The inodes of the files in /dev/shm that the processes use."""
    inodes = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue
        inodes |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return inodes


def kill(launcher: subprocess.Popen, pattern: str) -> End:
    """SIGKILL the first process that fits the pattern, the launcher itself if it is empty, and wait for the end."""
    tree = process_tree(launcher)
    victims = [process for process in [*tree][1:] if re.search(pattern, tree[process])] if pattern else [*tree][:1]
    assert victims, sorted(tree.values())
    victims[0].kill()
    start, inodes, errors = time.monotonic(), shared_memory(tree), None
    try:
        while errors is None and time.monotonic() < start + 300:
            inodes |= shared_memory(tree)
            with suppress(subprocess.TimeoutExpired):
                _, errors = launcher.communicate(timeout=0.5)
        # of a launcher that was killed, the processes end by themselves
        _, alive = psutil.wait_procs(tree, timeout=0.1 if pattern else 30)
        seconds = time.monotonic() - start
    finally:
        launcher.kill()
    left = [tree[process] for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    left += [entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes]
    return End(seconds, launcher.returncode, errors or "", victims[0].pid, left)


def last_step(run: Path) -> int:
    return max(complete_steps(run), default=0)


def steps_logged(run: Path) -> list[int]:
    """Of the run's last attempt."""
    log = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def resume(inputs: Path, *overrides: str) -> tuple[subprocess.Popen, int]:
    """The same command again; the launcher, and the step after which it must go on."""
    (inputs / "faults/metrics.jsonl").unlink(missing_ok=True)  # that of the attempt before; nobody reads it
    step = last_step(inputs / "faults")
    return start_run(inputs, "faults", *SETTINGS, *overrides), step


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_killed_process_ends_the_run(inputs, kind):
    run = inputs / "faults"
    launcher, before = resume(inputs, "trainer.total_training_steps=1000")
    wait_until(lambda: last_step(run) > before and len(steps_logged(run)) > 0, launcher)
    assert steps_logged(run)[0] == before + 1, "resumed from the last complete checkpoint"
    end = kill(launcher, KINDS[kind])
    error = next((line.strip() for line in end.errors.splitlines() if f"process {end.pid}" in line), "")
    print(f"\n| {kind} | {end.seconds:.0f} | {end.code} | {error[:200]} | {end.left or 'nothing'} | {before + 1} |")
    assert end.seconds < 90 and end.code != 0 and end.left == []
    assert kind == "launcher" or re.search(rf"\(process {end.pid} on [\w.:-]+\)", error), end.errors


def test_the_same_command_goes_on_to_the_end(inputs):
    launcher, before = resume(inputs, f"trainer.total_training_steps={last_step(inputs / 'faults') + 1}")
    _, errors = launcher.communicate(timeout=550)
    assert launcher.returncode == 0, errors
    assert before > 0 and steps_logged(inputs / "faults") == [before + 1]


@pytest.mark.skipif(chosen != "all", reason="tried by hand: what it kills is of no use to a run")
def test_a_run_goes_on_without_rays_monitors(inputs):
    launcher, before = resume(inputs, "trainer.total_training_steps=1000")
    run = inputs / "faults"
    wait_until(lambda: last_step(run) > before, launcher)
    tree = process_tree(launcher)
    victims = [process for process in tree if any(name in tree[process] for name in DISPENSABLE)]
    assert len(victims) == len(DISPENSABLE)
    for victim in victims:
        victim.kill()
    step = last_step(run)
    wait_until(lambda: last_step(run) > step + 5, launcher)
    launcher.terminate()
    launcher.communicate(timeout=60)
