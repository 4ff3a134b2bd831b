"""Environments of a user's class in processes of their own, so that one that blocks or hangs stops nothing else.

    Hosts ── starts ──> host.py, which has imported the class ── forks ──> a process for each instance and its copies

One call at a time reaches a process. A call that is given up ends its process, and with it the other copies, which are
brought back by replay when they are needed.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl.workers.rollout.gym.host import START_SECONDS
from verl.workers.rollout.stateful import Instance, InstanceLost, Step

HOST = Path(__file__).with_name("host.py")
END_SECONDS = 3  # time for the server to end by itself


class Hosts:
    """The processes with instances of one class, with `reset(task, seed)` and `step(action)`, or of a `gymnasium`
    environment. `script` is the program of the server, `env` its environment variables."""

    def __init__(self, class_path: str, script: Path = HOST, env: Mapping[str, str] | None = None):
        self.class_path, self.script, self.env = class_path, script, env
        self._process: asyncio.subprocess.Process | None = None
        self._start_task: asyncio.Future | None = None
        self.can_copy = False  # whether instances can copy themselves; known after the first reset

    def instance(self, task: Any, seed: int) -> "ProcessInstance":
        return ProcessInstance(self, task, seed)

    async def _start(self) -> None:
        """Import the class in a server; raise ValueError if it cannot be imported, or lacks a method."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        command = [str(self.script), str(theirs.fileno()), self.class_path, json.dumps(sys.path)]
        options = {"pass_fds": [theirs.fileno()], "stdin": asyncio.subprocess.DEVNULL, "start_new_session": True}
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                os.environ.get("FORK_SERVER_PYTHON", sys.executable), *command, env=self.env, **options
            )
        loop = asyncio.get_running_loop()
        reply = await asyncio.wait_for(loop.sock_recv(self._control, 1 << 16), START_SECONDS + END_SECONDS)
        ended = f"its process ended at the import, which may take {START_SECONDS} seconds"
        about = json.loads(reply) if reply else {"error": ended}
        if "error" in about:
            raise ValueError(f"environment.class_path={self.class_path}: {about['error']}")
        self.can_copy = about["can_copy"]

    async def start(self) -> None:
        """Wait for the server, which is started if none runs."""
        ended = self._process is not None and self._process.returncode is not None
        if self._start_task is None or self._start_task.done() and (ended or self._start_task.exception()):
            self._start_task = asyncio.ensure_future(self._start())
        await asyncio.shield(self._start_task)

    async def fork(self) -> "Host":
        """Return a new process."""
        pipe, theirs = socket.socketpair()
        with theirs:
            while True:
                try:
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                    break
                except BlockingIOError:  # many at once
                    await asyncio.sleep(0.01)
        host = Host(Connection(pipe.detach()))
        host.pid = await host.receive()
        return host

    async def stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError):  # the server has ended
            self._control.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        if self._process.returncode is None:  # the process is still inside the import
            self._process.kill()
            await self._process.wait()
        self._control.close()


class Host:
    """A process with an instance and its copies."""

    pid = 0

    def __init__(self, pipe: Connection):
        self.pipe, self.numbers, self.alive = pipe, itertools.count(), 0
        self.one_call, self.is_lost = asyncio.Lock(), False

    async def receive(self) -> Any:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.pipe.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self.pipe.fileno())
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            self.is_lost = True
            raise InstanceLost("its process has ended") from error

    async def call(self, method: str, number: int, *arguments: Any) -> Any:
        """Call a method of an instance; the caller holds `one_call`. Raise InstanceLost or RuntimeError if it fails."""
        if self.is_lost:
            raise InstanceLost("its process has ended")
        try:
            with contextlib.suppress(OSError):  # the missing answer will say so
                self.pipe.send((method, number, arguments))
            result, error = await self.receive()
        except asyncio.CancelledError:
            self.end()
            raise
        if error is not None:
            raise RuntimeError(error)
        return result

    def end(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pipe.close()


class ProcessInstance(Instance):
    """An instance in a process; `task` and `seed` are the arguments of its `reset`."""

    def __init__(self, hosts: Hosts, task: Any, seed: int):
        self.hosts, self.task, self.seed = hosts, task, seed
        self.host: Host | None = None
        self.number = 0

    @property
    def is_lost(self) -> bool:
        return self.host is not None and self.host.is_lost

    @property
    def one_call(self) -> AbstractAsyncContextManager:
        return nullcontext() if self.host is None else self.host.one_call

    async def prepare(self, make_room: Callable[[Exception], None]) -> None:
        await self.hosts.start()

    async def reset(self, recorded: str | None = None) -> str:
        self._enter(await self.hosts.fork())
        return await self.host.call("reset", self.number, self.task, self.seed)

    def _enter(self, host: Host) -> None:
        host.alive += 1
        self.host, self.number = host, next(host.numbers)

    async def step(self, action: str, recorded: Step | None = None) -> Step:
        return Step(*await self.host.call("step", self.number, action))

    async def copy(self) -> "ProcessInstance":
        other = ProcessInstance(self.hosts, self.task, self.seed)
        other._enter(self.host)
        try:
            await self.host.call("copy", self.number, other.number)
        except BaseException:
            self.host.alive -= 1
            raise
        return other

    async def close(self) -> None:
        if self.host is None:
            return
        self.host.alive -= 1
        try:
            async with self.host.one_call:
                if not self.host.is_lost:
                    await self.host.call("close", self.number)
        except (InstanceLost, RuntimeError):
            pass
        finally:
            if self.host.alive < 1:
                self.host.end()
