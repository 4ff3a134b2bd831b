"""Ends processes that a program has left behind, by an entry of their environment."""

import os
import signal
from contextlib import suppress
from pathlib import Path

KILL_ROUNDS = 10  # number of searches for processes that were started by others while these were killed


def kill_marked(mark: bytes) -> None:
    """Kill the processes that have a mark in their environment (Linux)."""
    for _ in range(KILL_ROUNDS):
        killed = 0
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # a process of another user, or one that has ended
                if mark in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    killed += 1
        if not killed:
            return
