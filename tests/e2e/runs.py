"""Starting the user's command on the real stack, and looking at its processes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.forked import MODULES, as_in_a_run
from verl.evaluation.model.server import free_port

ROOT = Path(__file__).resolve().parents[2]
GRPO, HAPO = "recipe/common/run_grpo_countdown.sh", "recipe/hapo/run_countdown_cpu.sh"
LATR, HATO = "recipe/latr/run_countdown_cpu.sh", "recipe/hato/run_countdown_cpu.sh"
# the command line of an actor that nobody calls through Ray, for which upstream would wait forever
STORAGE = "ray::SimpleStorageUnit"
NO_VALIDATION = ["trainer.test_freq=-1", "trainer.val_before_train=false"]
TWO_STEPS = ["trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.tree_freq=1", *NO_VALIDATION]
PARITY_REWARD = f"reward.custom_reward_function.path={ROOT}/tests/e2e/parity_reward.py"
# for a run as a user starts it, which makes its imports itself
AS_TYPED = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
# Ray 2.60 asks for a token by default, which both sides would read from the user's home
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}


def imports_made() -> dict[str, str]:
    """The environment of a run whose imports a server of this process has made, so that it makes none itself."""
    # the tests' own tools and rewards are part of what is installed
    environment = as_in_a_run({**os.environ, "PYTHONPATH": f"{ROOT}/tests/e2e"})
    made = f"import sys; sys.exit({MODULES[-1]!r} not in sys.modules)"
    while subprocess.run(["python", "-c", made], env=environment).returncode:
        time.sleep(0.2)
    return environment


def start_run(inputs: Path, name: str, *overrides: str, script: str = GRPO, **environment: str) -> subprocess.Popen:
    """Start a recipe's script for Countdown with a small batch; the run's folder is `inputs / name`.

    Its launcher is a fork of a server that this process has started, unless the environment is `AS_TYPED`.
    """
    command = ["bash", script]
    command += ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    command += ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.val_kwargs.n=2", *overrides]
    env = imports_made() | {"HARDWARE": "cpu", "MODEL_PATH": f"{inputs}/model", "DATA_DIR": str(inputs)}
    env |= {"EXPERIMENT_NAME": name, "RUN_DIR": f"{inputs}/{name}"} | environment
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def finished(launcher: subprocess.Popen) -> str:
    """Wait for the end of a run, which must succeed, and return what it printed."""
    out, errors = launcher.communicate(timeout=550)
    assert launcher.returncode == 0, errors
    return out + errors


def finish_run(inputs: Path, name: str, *overrides: str, **options: str) -> Path:
    """Start a run that must end well; its folder."""
    finished(start_run(inputs, name, *overrides, **options))
    return inputs / name


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


@dataclass(frozen=True)
class End:
    """The end of a run after a SIGKILL."""

    seconds: float
    code: int
    errors: str  # the launcher's stderr
    pid: int  # the killed process
    left: list[str]  # processes and files in shared memory


def prints_where(process: psutil.Process, launcher: subprocess.Popen) -> bool:
    """Whether its errors go into the launcher's pipe."""
    with suppress(OSError):  # the process has just ended
        return os.path.samefile(f"/proc/{process.pid}/fd/2", f"/proc/self/fd/{launcher.stderr.fileno()}")
    return False


def process_tree(launcher: subprocess.Popen) -> dict[psutil.Process, str]:
    """The launcher and its descendants, with their command lines.

    Of a launcher that is a fork, `launcher` is the client; what prints into the same pipe, but is no descendant, is it.
    """
    commands = {}
    root = psutil.Process(launcher.pid)
    forks = [process for process in psutil.process_iter() if prints_where(process, launcher)]
    root = next((process for process in forks if root not in [process, *process.parents()]), root)
    for process in [root, *root.children(recursive=True)]:
        try:
            commands[process] = " ".join(process.cmdline())
        except psutil.Error:  # the process has just ended
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
    """SIGKILL the first descendant of the launcher that fits the pattern, and wait for the end."""
    tree = process_tree(launcher)
    victims = [process for process in [*tree][1:] if re.search(pattern, tree[process])]
    assert victims, sorted(tree.values())
    victims[0].kill()
    start, inodes, errors = time.monotonic(), shared_memory(tree), None
    try:
        while errors is None and time.monotonic() < start + 300:
            inodes |= shared_memory(tree)
            with suppress(subprocess.TimeoutExpired):
                _, errors = launcher.communicate(timeout=0.5)
        _, alive = psutil.wait_procs(tree, timeout=0.1)
        seconds = time.monotonic() - start
    finally:
        launcher.kill()
    left = [tree[process] for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    left += [entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes]
    return End(seconds, launcher.returncode, errors or "", victims[0].pid, left)


def trees_of(run: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"trees/step_{step:06d}.jsonl").read_text().splitlines()]


def logged_steps(run: Path) -> list[int]:
    """Return the steps in the metrics of the run's last attempt."""
    log = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


@contextmanager
def ray_cluster(nodes: int, cpus: int, environment: dict[str, str]) -> Iterator[str]:
    """A Ray cluster of this machine, a raylet for each node, with addresses and resources of their own; its address.

    Node i is 127.0.0.i; each has `cpus` logical CPUs and one worker slot. With `imports_made()` as its environment the
    workers of its first job, of no other, are forks.
    """
    # a folder of its own: Ray notes "the current cluster" there, and other processes would find it; short, for sockets
    folder = tempfile.mkdtemp(prefix="ray")
    port = free_port()
    address, started = f"127.0.0.1:{port}", []
    shared = [f"--num-cpus={cpus}", "--num-gpus=1", "--object-store-memory=200000000", "--block"]
    log = Path(folder, "ray_start.log")
    options = {"stderr": subprocess.STDOUT, "cwd": folder, "start_new_session": True}
    environment = {**environment, **NO_TOKEN, "PYTHONPATH": f"{ROOT}/tests/e2e"}
    try:
        try:
            for node in range(1, nodes + 1):
                head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
                command = ["python", "-m", "ray.scripts.scripts", "start", *shared, f"--node-ip-address=127.0.0.{node}"]
                command += head if node == 1 else [f"--address={address}"]
                with open(log, "a") as output:
                    started.append(subprocess.Popen(command, env=environment, stdout=output, **options))
                wait_until(lambda: listens(port), started[-1], seconds=150)
            wait_until(lambda: n_nodes(address) == nodes, started[0], seconds=150)
        except AssertionError as error:
            raise AssertionError(f"ray start: {log.read_text()[-4000:]}") from error
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
