"""Agents' programs: one process for each trajectory, which is a command, or a function in a fork of a server.

    Programs ── starts ──> host.py, which has imported the function ── forks ──> a keeper and a program each

A program gets a clean environment and a temporary folder, and ends with everything that it has started. This protects
the trainer against programs that fail, not against hostile ones: they run as the same user, and can read its files and
the environment of its processes.
"""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.marked_processes import kill_marked
from verl.workers.rollout.gym.process import Host, Hosts
from verl.workers.rollout.stateful import InstanceLost


@dataclass(frozen=True)
class Outcome:
    """The end of a program: its result, at most 64 KiB of the last line of a command's standard output or of a
    function's value as text, and why it failed, such as "exit code 3: no such model"."""

    result: str
    failed: str = ""


class Programs:
    """The programs of a rollout worker, by the keys of `AgentKeys` with these names. `env` adds to HOME, LANG,
    OPENAI_API_KEY, OPENAI_BASE_URL, PATH, TMPDIR, and PYTHONHASHSEED, which gives sets the same order in a second run.
    `memory_mb` bounds a process's data (RLIMIT_DATA), with a function's imported modules."""

    def __init__(
        self,
        command: Sequence[str] | None = None,
        class_path: str | None = None,
        env: Mapping[str, str] = {},
        memory_mb: int | None = None,
    ):
        self.command, self.memory_mb = None if command is None else list(command), memory_mb
        self.folder = f"{tempfile.gettempdir()}/agent-{uuid.uuid4().hex}"
        basic = {"PATH": os.environ.get("PATH", os.defpath), "LANG": os.environ.get("LANG", "C.UTF-8")}
        self.env = basic | {"PYTHONHASHSEED": "0", "HOME": self.folder, **env, "TMPDIR": self.folder}
        self._own_env = dict(env)
        self._hosts = Hosts(class_path or "", Path(__file__).with_name("host.py"), self.env)
        self._running: set[Program] = set()

    async def prepare(self) -> None:
        """Import the function, or find the command; raise ValueError, which names the key, if there is none."""
        if self.command is not None and not (self.command and shutil.which(self.command[0], path=self.env["PATH"])):
            raise ValueError(f"environment.command={self.command}: there is no such program")
        await self._hosts.start()

    def start(self, row: Any, base_url: str, api_key: str) -> "Program":
        """Start a program for a row, which is sent as JSON; call it in the event loop."""
        folder = f"{self.folder}/{uuid.uuid4().hex}"
        own = {"TMPDIR": folder, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        env = self.env | {"HOME": folder} | self._own_env | own
        request = {"row": json.dumps(row), "base_url": base_url, "api_key": api_key, "env": env, "folder": folder}
        program = Program(self._hosts, request | {"command": self.command, "memory_mb": self.memory_mb})
        self._running.add(program)
        program.task.add_done_callback(lambda _: self._running.discard(program))
        return program

    async def stop(self) -> None:
        """End all programs and the server."""
        await asyncio.gather(*(program.end() for program in self._running))
        await self._hosts.stop()
        await asyncio.to_thread(kill_marked, f"TMPDIR={self.folder}".encode())
        shutil.rmtree(self.folder, ignore_errors=True)  # the server's work, unless it was killed


class Program:
    """A program that has been started (`Programs.start`)."""

    def __init__(self, hosts: Hosts, request: Mapping[str, Any]):
        self.folder = request["folder"]
        self._keeper = asyncio.ensure_future(self._start(hosts, request))
        self.task = asyncio.ensure_future(self._wait())

    async def outcome(self) -> Outcome:
        """Wait until the program and all that it has started have ended."""
        return await asyncio.shield(self.task)

    async def end(self) -> None:
        """Kill the program and all that it has started; return when they have ended."""
        await asyncio.wait({self._keeper})
        if self._keeper.exception() is None:
            with contextlib.suppress(OSError):  # the keeper has ended
                self._keeper.result().pipe.send(None)
        await asyncio.wait({self.task})

    async def _start(self, hosts: Hosts, request: Mapping[str, Any]) -> Host:
        await hosts.start()
        keeper = await hosts.fork()
        keeper.pipe.send(request)
        return keeper

    async def _wait(self) -> Outcome:
        try:
            keeper = await self._keeper
            with keeper.pipe:
                return Outcome(*await keeper.receive())
        except (OSError, InstanceLost):
            # Somebody has killed the keeper, and the program died with it. What the program had started is found by its
            # TMPDIR. Forks of a function's process, and programs with another TMPDIR, are missed: they run until the
            # server ends, or for good if somebody kills the server too.
            await asyncio.to_thread(kill_marked, f"TMPDIR={self.folder}\0".encode())
            shutil.rmtree(self.folder, ignore_errors=True)
            return Outcome("", "the process that watches it was killed")
