"""The memory of real processes by kind, and the warning before Ray kills one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.utils import get_system_memory, get_used_memory

from tests.forked import ray_of_forks
from verl.trainer.host_memory import (
    LAUNCHER,
    METRIC,
    USED_SHARE,
    HostMemoryWatch,
    kinds_of_processes,
    measure,
    run_roots,
)

pytestmark = pytest.mark.slow

# A process that reads its tree, [MB, forks, [[name, tree of a child], ...]], keeps memory, which its forks share,
# starts the children under their names, and says when all of them have started.
PROCESS = """
import json, os, subprocess, sys
megabytes, forks, children = json.loads(sys.stdin.readline())
memory = b"x" * (megabytes * 2**20)
for name, tree in children:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([name, "-c", sys.orig_argv[2]], executable="/proc/self/exe", **pipes)
    print(json.dumps(tree), file=child.stdin, flush=True)
    child.stdout.readline()
if any(os.fork() == 0 for _ in range(forks)):
    sys.stdin.read()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(*tree) -> Iterator[int]:
    """A process with a tree of children; its process id. All of them end with the block."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", PROCESS], **pipes)
    try:
        print(json.dumps(tree), file=process.stdin, flush=True)
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            member.kill()
        process.communicate()


def test_memory_counts_for_the_kind_of_the_command_line_or_else_for_the_parents():
    """A tool's process, which an agent-loop worker starts, has a name of its own."""
    tool = ["some_tool", [200, 0, []]]
    workers = ["ray::GroupAgentLoopWorker", [100, 0, [tool]]]
    with running(150, 0, [workers, ["VLLM::EngineCore", [400, 0, []]]]) as pid:
        sizes = measure(kinds_of_processes({pid: "trainer"}))
    expected = {"trainer": 0.157, "agent_loop": 0.315, "vllm": 0.419}  # MB here are 2^20 bytes
    assert sizes.keys() == expected.keys()
    for kind, size in expected.items():
        assert size < sizes[kind] < size + 0.05


def test_memory_that_forks_share_counts_once():
    with running(400, 3, []) as pid:
        kinds = kinds_of_processes({pid: "workers"})
        sizes = measure(kinds)
    assert len(kinds) == 4 and 0.419 < sizes["workers"] < 0.5


KINDS = [line.split(" | ") for line in Path(__file__).with_name("command_lines.txt").read_text().splitlines()[1:]]


@pytest.mark.parametrize("kind, name", KINDS)
def test_kinds_of_the_command_lines_of_a_run(kind, name):
    with running(0, 0, [[name, [0, 0, []]]]) as pid:
        kinds = kinds_of_processes({pid: "other"})
    assert {process.info["cmdline"][0]: kind for process, kind in kinds.items()}[name] == kind


@ray.remote(num_cpus=0)
class Member:
    """An actor of a run."""

    def pid(self) -> int:
        return os.getpid()


def test_a_runs_processes_descend_from_its_launcher_or_else_from_its_actors(monkeypatch):
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    assert run_roots() == {os.getppid(): "other"}
    monkeypatch.setenv(LAUNCHER, "1234567")  # The cluster was started in another run.
    assert run_roots() == {os.getpid(): "trainer"}
    with ray_of_forks(num_cpus=1, object_store_memory=10**8):
        members = [Member.remote() for _ in range(2)]
        pids = ray.get([member.pid.remote() for member in members])
        assert run_roots() == {os.getpid(): "trainer", **dict.fromkeys(pids, "other")}


def test_memory_near_rays_limit_is_warned_of_once_with_what_to_lower(capsys):
    watch = HostMemoryWatch(threshold=get_used_memory() / get_system_memory())
    watch.look()
    watch.look()
    warning = capsys.readouterr().err
    assert warning.count("warning: ") == 1 and "RAY_memory_usage_threshold" in warning and "Lower " in warning
    roomy = HostMemoryWatch(threshold=2.0)
    roomy.look()
    assert capsys.readouterr().err == "" and 0 < roomy.used_share < 1


def test_metrics_are_the_peaks(monkeypatch):
    watch = HostMemoryWatch()
    monkeypatch.delenv(LAUNCHER, raising=False)
    before = watch.measure()["trainer"]
    memory = b"x" * 300 * 2**20
    watch.measure()
    del memory
    watch.measure()
    watch.look()
    metrics = watch.metrics()
    assert metrics[f"{METRIC}trainer"] > before + 0.3 and 0 < metrics[USED_SHARE] < 1
