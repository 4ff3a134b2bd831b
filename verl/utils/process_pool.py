"""A few processes that answer requests within a time limit; one that exceeds it is killed and replaced.

The process pools of the standard library cannot do that: a task that exceeds its time-out keeps its process. A pool's
script gets a socket to the parent as standard input. It writes the line `"ready"` when it can answer; then it reads
requests and writes replies, each a line of JSON, until the parent closes the socket.
"""

import json
import os
import queue
import socket
import subprocess
import sys
from typing import Any

START_SECONDS = 120.0


class _Process:
    def __init__(self, name: str, command: tuple[str, ...]):
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, *command)
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._replies = self._socket.makefile(encoding="utf-8")
        if self.ask(b"", START_SECONDS) != "ready":
            self.kill()
            raise RuntimeError(f"a process of {name} does not start (see the error above)")

    def ask(self, request: bytes, seconds: float) -> Any:
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(request)
            return json.loads(self._replies.readline())
        except (OSError, ValueError):  # OSError includes TimeoutError; an empty line is the end of the process.
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()


class ProcessPool:
    """A pool of at most four processes of a script, each started when it is first needed; any thread may ask.

    Args:
        name: name of the pool for errors.
        command: path of the script, and its arguments.
    """

    def __init__(self, name: str, *command: str):
        self.name, self.command = name, command
        self._fill()
        os.register_at_fork(after_in_child=self._fill)  # Two processes must not share a socket.

    def _fill(self) -> None:
        self.slots: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(min(4, os.cpu_count() or 1)):
            self.slots.put(None)

    def ask(self, request: Any, seconds: float) -> Any:
        """Return the reply to a request, or None after `seconds`, which do not include a process's start. Raises
        RuntimeError if no process starts."""
        process, reply = self.slots.get(), None
        try:
            process = process or _Process(self.name, self.command)
            reply = process.ask(json.dumps(request).encode() + b"\n", seconds)
        finally:
            if reply is None and process is not None:
                process.kill()
                process = None
            self.slots.put(process)
        return reply
