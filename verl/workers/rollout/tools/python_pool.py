"""The trainer's side of the python tool's sandboxes: a supervisor process, and sandboxes made ahead of need.

A sandbox's life: `fork` asked of the supervisor -> waiting in `SandboxPool.take` -> `run` -> waiting again, or, where
the call has left a trace or was killed, ended, as the supervisor tells -> the next `fork`. There are never more than
`size`.
"""

import ast
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
# -I would do without "" in the path, but also without the seed
_START = "import sys; sys.path[0] = sys.argv.pop(1); import python_worker; del sys.path[0]; python_worker.main()"
# equal programs print their sets in equal order
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "nobody", "PYTHONHASHSEED": "0"}
_ENVIRONMENT |= {"LD_BIND_NOW": "1"}  # what is bound after a fork would be bound in each call
_ENVIRONMENT |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
START_SECONDS = 120  # to start the supervisor and its preloads
END_SECONDS = 10  # to end it by its own
READ_AFTER = 0.002  # seconds; what a shorter call prints is read once, when it has ended
WATCH_AFTER = 0.05  # seconds; shorter calls are not looked at by the memory watch
SET_UP_FAILED = 99  # python_worker.SET_UP_FAILED


class SandboxError(Exception):
    """No sandbox: the supervisor did not start, or has ended."""


@dataclass(frozen=True)
class Ended:
    """How a call's process ended: its exit code or minus its signal, its CPU seconds, and why it was killed, if it was:
    `memory`, or what `Sandbox.kill` was told."""

    code: int
    cpu_seconds: float
    reason: str | None


class Output:
    """The first and the last bytes of what was printed, `limit` in all at least."""

    def __init__(self, limit: int):
        self.limit, self.head, self.tail, self.size = limit, bytearray(), bytearray(), 0

    def add(self, part: bytes) -> None:
        self.size += len(part)
        room = self.limit - len(self.head)
        self.head += part[:room] if room > 0 else b""
        self.tail += part[max(room, 0) :]
        if len(self.tail) > 2 * self.limit:
            del self.tail[: -self.limit]

    def text(self, max_chars: int) -> str:
        """At most max_chars characters of the output, with a notice where the middle is left out."""
        missing = self.size - len(self.head) - len(self.tail)
        if not missing:
            text = (self.head + self.tail).decode("utf-8", "replace")
            if len(text) <= max_chars:
                return text
            head, tail = text, text
        else:
            head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        half = max_chars // 2
        notice = f"\n[output truncated: {self.size} bytes were printed, the middle is left out]\n"
        return head[: max_chars - half] + notice + (tail[-half:] if half else "")


class Sandbox:
    """A confined process that runs programs, one at a time."""

    def __init__(self, pool: "SandboxPool", number: int, sock: socket.socket):
        self._pool, self.number, self._socket = pool, number, sock
        self._loop = asyncio.get_running_loop()
        self._call: asyncio.Future[Ended] | None = None
        self._reason: str | None = None
        self.over = self._reusable = False
        self._loop.add_reader(sock, self._listen)

    async def run(self, code: bytes, *, seconds: float, max_bytes: int, keep: int) -> tuple[Output, Ended]:
        """Run a program to its end and to that of all its processes.

        Args:
            seconds: wall-clock limit; reason `timeout`.
            max_bytes: of output, after which it is killed; reason `output`.
            keep: bytes of output to keep from its start, and from its end.

        Raises:
            SandboxError: the supervisor has ended.
        """
        self._call, self._reusable = self._loop.create_future(), False
        later, output, call = self._loop.call_later, Output(keep), self._begin()
        kill = later(seconds, self.kill, "timeout")
        watch = later(WATCH_AFTER, self._pool.send, b"watch %d" % self.number)
        read = later(READ_AFTER, self._loop.add_reader, call, self._read, call, output, max_bytes)
        try:
            await self._put(call, code)
            ended = await asyncio.shield(self._call)  # cancelled or not, the supervisor will tell of its end
            while output.size <= max_bytes and (part := self._get(call)):
                output.add(part)
            return output, ended
        finally:
            for handle in (kill, watch, read):
                handle.cancel()
            self.kill("cancelled")
            self._loop.remove_reader(call)
            call.close()
            if watch.when() < self._loop.time():
                self._pool.send(b"leave %d" % self.number)
            if self._reusable and self._reason is None:
                self._pool.give_back(self)

    def _begin(self) -> socket.socket:
        """Our end of a socket whose other end the call's process has."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, contextlib.suppress(OSError):  # it has ended, as the supervisor will tell
            socket.send_fds(self._socket, [b"+"], [theirs.fileno()])
        return ours

    async def _put(self, call: socket.socket, code: bytes) -> None:
        try:
            await self._loop.sock_sendall(call, code)
            call.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it has ended: what it said, and its exit code, tell why

    def _read(self, call: socket.socket, output: Output, max_bytes: int) -> None:
        """A part of what has been printed so far."""
        part = self._get(call)
        output.add(part)
        if output.size > max_bytes:
            self.kill("output")
        if not part or output.size > max_bytes:
            self._loop.remove_reader(call)

    def _get(self, call: socket.socket) -> bytes:
        try:
            return call.recv(1 << 16)
        except (BlockingIOError, ConnectionResetError):  # no more; ended before it read the code
            return b""

    def kill(self, reason: str) -> None:
        """Ask the supervisor to end sandbox and call, unless the call has ended."""
        if self._call is not None and not self._call.done() and self._reason is None:
            self._reason = reason
            self._pool.send(b"kill %d" % self.number)

    def _listen(self) -> None:
        """How a call has ended, from the sandbox itself."""
        try:
            message = self._socket.recv(1 << 12).decode()
        except BlockingIOError:
            return
        except OSError:
            message = ""
        if not message:
            self._loop.remove_reader(self._socket)
        elif message.startswith("set-up"):
            self._call_has_ended(Ended(SET_UP_FAILED, 0, message))
        else:
            code, milliseconds, reusable = map(int, message.split())
            self._reusable = bool(reusable)
            self._call_has_ended(Ended(code, milliseconds / 1000, self._reason))

    def _call_has_ended(self, how: Ended) -> None:
        if self._call is not None and not self._call.done():
            self._call.set_result(how)

    def has_ended(self, code: int, cpu_seconds: float, reason: str) -> None:
        """It has ended for good, as the supervisor tells."""
        self._listen()  # what it had to say
        self._call_has_ended(Ended(code, cpu_seconds, self._reason if reason == "-" else reason))
        self._close()

    def is_lost(self) -> None:
        if self._call is not None and not self._call.done():
            self._call.set_exception(SandboxError("the sandboxes have ended"))
            self._call.exception()  # it may be that nobody waits for it
        self._close()

    def _close(self) -> None:
        self.over = True
        self._loop.remove_reader(self._socket)
        self._socket.close()


class SandboxPool:
    """`size` sandboxes at a time, of one isolation level and one interpreter.

    Args:
        python: path of the interpreter.
        level: `namespaces` or `process`, see python_sandbox.py.
        limits: memory_mb, cpu_seconds, max_processes, max_file_mb.
        preload: modules that each program finds already imported.
    """

    def __init__(self, python: str, level: str, limits: dict[str, int], preload: Sequence[str], size: int):
        self.python, self.level, self.size = python, level, size
        self._spec = {"level": level, "limits": limits, "preload": list(preload)}
        self.missing: list[str] = []
        self.alive = False
        self._count, self._sandboxes = 0, {}
        self._free: asyncio.Queue[Sandbox | None] = asyncio.Queue()

    async def start(self) -> None:
        """Start the supervisor and the first sandboxes.

        Raises:
            SandboxError: the interpreter does not start, or the machine does not give this level.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            command = [self.python, "-s", "-B", "-X", "utf8", "-c", _START, str(_HERE), str(theirs.fileno())]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                repr(self._spec),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        self.alive = True
        try:
            reply = await asyncio.wait_for(self._first_reply(), START_SECONDS)
            if "error" in reply:
                raise SandboxError(f"{self.level}: {reply['error']}")
            self.missing = reply["missing"]
            asyncio.get_running_loop().add_reader(self._control, self._listen)
            for _ in range(self.size):
                self._fork()
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def _first_reply(self) -> dict[str, Any]:
        reply = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
        return ast.literal_eval(reply.decode()) if reply else {"error": f"{self.python} ended at its start"}

    async def _probe(self) -> None:
        sandbox = await self.take()
        output, ended = await sandbox.run(b"import fractions\n6*7", seconds=START_SECONDS, max_bytes=9999, keep=9999)
        if output.text(9999) != "42\n" or ended.code:
            raise SandboxError(f"{self.level}: {output.text(9999)!r}, exit code {ended.code}, {ended.reason}")

    async def take(self) -> Sandbox:
        """A sandbox, waiting for one to come free. Raises SandboxError if the supervisor has ended."""
        while True:
            sandbox = await self._free.get()
            if sandbox is None:
                self._free.put_nowait(None)  # for the next who waits
                raise SandboxError("the sandboxes have ended")
            if not sandbox.over:
                return sandbox

    def give_back(self, sandbox: Sandbox) -> None:
        """A sandbox that is as good as new."""
        if not sandbox.over:
            self._free.put_nowait(sandbox)

    def send(self, message: bytes, fd: int | None = None) -> None:
        if not self.alive:
            return
        try:
            if fd is None:
                self._control.send(message)
            else:
                socket.send_fds(self._control, [message], [fd])
        except OSError:  # it has ended, or no longer listens
            self._lost()

    def _fork(self) -> None:
        if not self.alive:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._count += 1
        sandbox = self._sandboxes[self._count] = Sandbox(self, self._count, ours)
        self._free.put_nowait(sandbox)
        with theirs:
            self.send(b"fork %d" % self._count, theirs.fileno())

    def _listen(self) -> None:
        try:
            message = self._control.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lost()
            return
        number, code, milliseconds, reason = message.decode().split()
        sandbox = self._sandboxes.pop(int(number))
        sandbox.has_ended(int(code), int(milliseconds) / 1000, reason)
        if int(code) == SET_UP_FAILED:  # not at once: what is lacking may be processes or memory
            asyncio.get_running_loop().call_later(0.5, self._fork)
        else:
            self._fork()

    def _lost(self) -> None:
        if self.alive:
            self.alive = False
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            for sandbox in self._sandboxes.values():
                sandbox.is_lost()
            self._sandboxes.clear()
            self._free.put_nowait(None)

    async def close(self) -> None:
        """End all sandboxes and the supervisor."""
        self._lost()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except asyncio.TimeoutError:
            os.killpg(self._process.pid, 9)
            await self._process.wait()


def executable(python_path: str | None, conda_path: str | None, conda_env: str | None) -> str:
    """The interpreter's path. Raises ValueError if it is not there, or half of conda's two names is."""
    if (conda_path is None) != (conda_env is None):
        raise ValueError(f"conda_path={conda_path!r}, conda_env={conda_env!r}: expected both or none")
    if conda_path is not None and python_path is not None:
        raise ValueError(f"python_path={python_path!r} and conda_path={conda_path!r}: expected one of them")
    if conda_path is not None:
        name, path = "conda_path and conda_env", Path(conda_path).expanduser() / "envs" / conda_env / "bin" / "python"
    else:
        # where this process is a fork, `sys.executable` is the client of scripts/fork_server.py
        interpreter = os.environ.get("FORK_SERVER_PYTHON", sys.executable)
        name, path = "python_path", Path(python_path or interpreter).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ValueError(f"{name}: {path} is no interpreter; expected a file that can be executed")
    return os.path.abspath(path)
