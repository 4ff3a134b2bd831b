"""A run that joins a Ray cluster too small for it says so; upstream alone would wait for ever."""

import os
import shutil
import socket
import subprocess
import tempfile
import time

import psutil
import pytest

from tests.e2e.runs import start_run, wait_until

# Ray 2.60 asks for a token by default, which both sides would read from the user's home
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
pytestmark = pytest.mark.e2e


@pytest.fixture
def small_cluster():
    """A Ray node of 3 CPUs and one worker slot; its address."""
    # a folder of its own: Ray notes "the current cluster" there, and other processes would find it; short, for sockets
    folder = tempfile.mkdtemp(prefix="ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["ray", "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"]
    command += [
        "--num-cpus=3",
        "--num-gpus=1",
        "--include-dashboard=false",
        "--object-store-memory=100000000",
        f"--temp-dir={folder}",
    ]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, **NO_TOKEN}}
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        wait_until(lambda: listens(port), process, seconds=60)
        yield f"127.0.0.1:{port}"
    finally:
        for started in [*psutil.Process(process.pid).children(recursive=True), process]:
            started.kill()
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_too_few_cpus_are_named_within_30_seconds(inputs, small_cluster):
    launcher = start_run(inputs, "cluster", RAY_ADDRESS=small_cluster, **NO_TOKEN)
    log = inputs / "cluster" / "train.log"
    connected = "Connected to Ray cluster"
    wait_until(lambda: log.exists() and connected in log.read_text(), launcher, seconds=120)
    started = time.monotonic()
    _, errors = launcher.communicate(timeout=120)
    seconds = time.monotonic() - started
    assert launcher.returncode == 3
    assert "Ray has waited" in errors and "ray start --num-cpus" in errors and "num_data_storage_units" in errors
    # TaskRunner's own start, about 20 s, comes before the first actor that cannot be placed
    assert seconds < 20 + 30
