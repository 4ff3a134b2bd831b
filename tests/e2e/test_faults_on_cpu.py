"""SIGKILL of a run's processes, one kind after the other: the run ends soon, names the process, leaves nothing behind,
and the same command goes on from the last complete checkpoint. Each launch goes on where the one before it was killed.

They are tried by hand, each with a launch of one to three minutes:

    FAULTS=all python -m pytest -s tests/e2e/test_faults_on_cpu.py

The tests of GRPO, HATO and several workers kill a storage of TransferQueue, an engine core, a driver and a worker.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.runs import (
    AS_TYPED,
    NO_VALIDATION,
    STORAGE,
    finished,
    kill,
    logged_steps,
    process_tree,
    start_run,
    wait_until,
)
from verl.trainer.checkpoint_marker import complete_steps

# kind -> pattern of the process's command line
KINDS = {
    "TransferQueue's storage": STORAGE,
    "GCS": "gcs/gcs_server",
    "driver": r"-m verl\.trainer\.main_ppo",
    "TransferQueue's controller": "ray::TransferQueueController",
    "TaskRunner": "ray::TaskRunner",
    "FSDP worker": "ray::WorkerDict",
    "vLLM's server": r"ray::(vLLMHttp|TopLogprobs)Server",
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
CHOSEN = os.environ.get("FAULTS", "").replace("all", ",".join(KINDS)).split(",")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHOSEN == [""], reason="half an hour, by hand; other tests kill processes of four kinds"),
]
SETTINGS = ["trainer.save_freq=1", *NO_VALIDATION]


def last_step(run: Path) -> int:
    return max(complete_steps(run), default=0)


def resume(inputs: Path, *overrides: str) -> tuple[subprocess.Popen, int]:
    """The same command again; the launcher, and the step after which it must go on."""
    (inputs / "faults/metrics.jsonl").unlink(missing_ok=True)  # that of the attempt before; nobody reads it
    step = last_step(inputs / "faults")
    return start_run(inputs, "faults", *SETTINGS, *overrides, **AS_TYPED), step


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_killed_process_ends_the_run(inputs, kind):
    run = inputs / "faults"
    launcher, before = resume(inputs, "trainer.total_training_steps=1000")
    wait_until(lambda: last_step(run) > before and len(logged_steps(run)) > 0, launcher)
    assert logged_steps(run)[0] == before + 1, "resumed from the last complete checkpoint"
    end = kill(launcher, KINDS[kind])
    error = next((line.strip() for line in end.errors.splitlines() if f"process {end.pid}" in line), "")
    print(f"\n| {kind} | {end.seconds:.0f} | {end.code} | {error[:200]} | {end.left or 'nothing'} | {before + 1} |")
    assert end.seconds < 90 and end.code != 0 and end.left == []
    assert kind == "launcher" or re.search(rf"\(process {end.pid} on [\w.:-]+\)", error), end.errors


def test_the_same_command_goes_on_to_the_end(inputs):
    launcher, before = resume(inputs, f"trainer.total_training_steps={last_step(inputs / 'faults') + 1}")
    finished(launcher)
    assert before > 0 and logged_steps(inputs / "faults") == [before + 1]


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
