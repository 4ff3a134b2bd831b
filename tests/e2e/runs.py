"""Starting the user's command on the real stack, and looking at its processes."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from verl.evaluation.server import free_port

ROOT = Path(__file__).resolve().parents[2]
GRPO, HAPO = "recipe/common/run_grpo_countdown.sh", "recipe/hapo/run_countdown_cpu.sh"
LATR, HATO = "recipe/latr/run_countdown_cpu.sh", "recipe/hato/run_countdown_cpu.sh"
# Ray 2.60 asks for a token by default, which both sides would read from the user's home
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}


def start_run(inputs: Path, name: str, *overrides: str, script: str = GRPO, **environment: str) -> subprocess.Popen:
    """Start a recipe's script for Countdown with a small batch; the run's folder is `inputs / name`."""
    command = ["bash", script]
    command += ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    command += ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.val_kwargs.n=2", *overrides]
    env = {**os.environ, "HARDWARE": "cpu", "MODEL_PATH": f"{inputs}/model", "DATA_DIR": str(inputs)}
    env |= {"EXPERIMENT_NAME": name, "RUN_DIR": f"{inputs}/{name}"} | environment
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def wait_until(condition: Callable[[], bool], launcher: subprocess.Popen, seconds: float = 600) -> None:
    """Poll until the condition holds; fails when the run ends first, or ends it and fails when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None, launcher.communicate()[1]
        if time.monotonic() > deadline:
            launcher.terminate()
            launcher.communicate(timeout=60)
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.2)


def kill_one(launcher: subprocess.Popen, named: str) -> tuple[int, str, list[psutil.Process]]:
    """SIGKILL the first process below the launcher whose command line has `named`.

    Returns the launcher's exit code, what it printed as errors, and those of its processes that outlived it.
    """
    started = psutil.Process(launcher.pid).children(recursive=True)
    victims = [process for process in started if named in " ".join(process.cmdline())]
    assert victims, [process.cmdline() for process in started]
    victims[0].kill()
    try:
        _, errors = launcher.communicate(timeout=300)
    finally:
        launcher.kill()
    alive = [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return launcher.returncode, errors, alive


@contextmanager
def ray_cluster(nodes: int, cpus: int) -> Iterator[str]:
    """A Ray cluster of this machine, a raylet for each node, with addresses and resources of their own; its address.

    Node i is 127.0.0.i; each has `cpus` logical CPUs and one worker slot.
    """
    # a folder of its own: Ray notes "the current cluster" there, and other processes would find it; short, for sockets
    folder = tempfile.mkdtemp(prefix="ray")
    port = free_port()
    address, started = f"127.0.0.1:{port}", []
    shared = [f"--num-cpus={cpus}", "--num-gpus=1", "--object-store-memory=200000000", "--block"]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, "start_new_session": True}
    # the tests' own tools and rewards are part of what is installed on every node
    environment = {**os.environ, **NO_TOKEN, "PYTHONPATH": f"{ROOT}/tests/e2e"}
    try:
        for node in range(1, nodes + 1):
            head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
            command = ["ray", "start", *shared, f"--node-ip-address=127.0.0.{node}"]
            command += head if node == 1 else [f"--address={address}"]
            started.append(subprocess.Popen(command, env=environment, **options))
            wait_until(lambda: listens(port), started[-1], seconds=60)
        wait_until(lambda: n_nodes(address) == nodes, started[0], seconds=60)
        yield address
    finally:
        for process in reversed(started):
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def assert_on_two_nodes(run: Path) -> None:
    """Two workers saved, and a node has room for one."""
    saved = sorted(path.name for path in run.glob("global_step_2/actor/model_world_size_*"))
    assert saved == [f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def n_nodes(address: str) -> int:
    """Nodes that have joined."""
    command = ["ray", "status", f"--address={address}"]
    told = subprocess.run(command, env={**os.environ, **NO_TOKEN}, capture_output=True, text=True).stdout
    return len(re.findall(r"^ *1 node_", told, re.MULTILINE))
