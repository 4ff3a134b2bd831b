"""Real OpenEnv servers on the loopback, each in a process with packages of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.packages import unpacked
from verl.evaluation.model.server import free_port

# imports of the server that no dependency of this project brings; it does not import its dependency gradio
PACKAGES = ("openenv-core==0.3.0", "py-key-value-aio==0.5.0", "beartype==0.23.1", "exceptiongroup==1.3.2")
FASTMCP = "fastmcp-slim==4.2.3"  # reads its own version


class OpenEnvProcess:
    """A server that can be killed and started again at the same address."""

    def __init__(self, game: str = "words", max_sessions: int = 64):
        self.port, self.game, self.max_sessions = free_port(), game, max_sessions
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        packages = [*map(unpacked, PACKAGES), unpacked(FASTMCP, metadata=True)]
        program = Path(__file__).with_name("openenv_games.py")
        command = [sys.executable, str(program), str(self.port), str(self.max_sessions), self.game]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages))}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        while True:
            try:
                httpx.get(f"{self.url}/health", trust_env=False).raise_for_status()
                return
            except httpx.HTTPError:
                assert self.process.poll() is None, "the OpenEnv server does not start"
                time.sleep(0.1)

    def pause(self) -> None:
        """SIGSTOP: who calls it waits."""
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


@contextmanager
def openenv_server(game: str = "words", max_sessions: int = 64) -> Iterator[OpenEnvProcess]:
    server = OpenEnvProcess(game, max_sessions)
    server.start()
    try:
        yield server
    finally:
        server.kill()
