"""Processes of the Python tool, for one program or for a session, in which a trajectory's programs are cells.

    <python>x = 6</python>  <python>x * 7</python>   42

Cells share a process, its names and its files. A cell over a limit, or whose process ends, ends the session. The next
call starts a new one, and its result says so. A process that ends by no fault of a cell is replaced by one that runs
the cells again (tools/environment.py).
"""

import array
import asyncio
import contextlib
import fcntl
import socket
import termios
import time
from typing import Any, NamedTuple

from verl.workers.rollout.tools.base_tool import ToolError, ToolSession

NEW_SESSION = "[This call runs in a new session: names and files of earlier calls are gone.]\n"
MAX_OUTPUT_BYTES, END_SECONDS = 4 << 20, 10


class Result(NamedTuple):
    """A program's result."""

    output: bytes
    code: int | None  # its exit code, or minus its signal; None if its process goes on
    reason: str | None = None  # the limit at which it was stopped: `timeout`, `output`, `disk`, `threads` or `cpu`


class PythonSession(ToolSession):
    """A session, whose process its first call takes; cells share limits and places of a `PythonTool`."""

    def __init__(self, tool: Any):
        self._tool, self._process = tool, None
        self._has_ended = False  # whether a cell has ended the session, so that the next result says so
        self._lost = False

    @property
    def is_lost(self) -> bool:
        return self._lost or self._process is not None and self._process.is_lost()

    async def execute(self, content: str, *, timeout: float) -> str:
        """Return a cell's output, as `PythonTool.execute`. A lost session raises ToolError of kind `sandbox` without
        retry, since its names are gone."""
        if self.is_lost:
            raise self._loss("its process has ended between two cells")
        result = await self._tool.run_in_turn(self._run, content, timeout)
        notice, self._has_ended = NEW_SESSION * self._has_ended, result.code is not None
        try:
            return notice + self._tool.answer(result, timeout)
        except ToolError as error:
            message = notice + str(error)
            raise ToolError(message, kind=error.kind, retry=False, ends_session=self._has_ended) from error

    async def _run(self, interpreter: Any, code: bytes, seconds: float) -> Result:
        if self._process is not None and self._process.has_ended:
            await self.close()
        if self._process is None:
            self._process = SessionProcess(interpreter)
        process, self._lost = self._process, self._process.cells > 0
        try:
            result = await process.run(code, seconds)
        except ToolError as error:
            if not self._lost:
                raise
            raise self._loss(str(error)) from error
        self._lost = False
        return result

    def _loss(self, why: str) -> ToolError:
        return ToolError(f"The Python session is lost ({why}).", kind="sandbox", retry=False, own_fault=True)

    async def end(self) -> None:
        await self.close()
        self._has_ended = True

    async def close(self) -> None:
        """End the process, and wait until it and its folder are gone."""
        process, self._process = self._process, None
        if process is not None:
            await process.closed()

    aclose = close


class SessionProcess:
    """The process of a session, or of one program, a fork of an `Interpreter`."""

    def __init__(self, interpreter: Any):
        self.cells, self.has_ended = 0, False
        self._interpreter = interpreter
        self._program, self._end = interpreter.take_process()  # sockets: see server.py

    def is_lost(self) -> bool:
        """Return whether the process has ended while it was idle."""
        if self.has_ended or not self.cells:
            return False
        try:
            self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    async def run(self, code: bytes, seconds: float) -> Result:
        """Run a cell, a text in UTF-8, for at most `seconds`; raise ToolError if it could not be confined."""
        try:
            result = await self._result(code, seconds)
        except OSError as error:
            self.end()
            raise self._interpreter.lost(self._end) from error
        except BaseException:
            self.end()
            raise
        self.cells += 1
        if result.code is not None:
            self.end()
        return result

    async def _result(self, code: bytes, seconds: float) -> Result:
        output = _Output(self._program)
        try:
            return await asyncio.wait_for(self._talk(code, output), seconds)
        except asyncio.TimeoutError:
            return Result(bytes(output.data), 0, "timeout")
        finally:
            output.stop()

    async def _talk(self, code: bytes, output: "_Output") -> Result:
        loop = asyncio.get_running_loop()
        try:
            self._end.send(b"run")
            await loop.sock_sendall(self._program, len(code).to_bytes(8, "little") + code)
        except OSError as error:  # the reply tells how the process has ended
            if not self.cells:
                raise self._interpreter.lost(self._end) from error
        reply = asyncio.ensure_future(loop.sock_recv(self._end, 1 << 12))
        try:
            await asyncio.wait({reply, output.is_too_long}, return_when=asyncio.FIRST_COMPLETED)
            ended, reason = (None, None) if not reply.done() else self._interpreter.value(reply.result())
        finally:
            reply.cancel()
        if reason == "lost":
            raise ToolError("The Python sandbox is not available (its process was killed).", kind="sandbox", retry=True)
        while output.read_part():  # the process is stopped or has ended, so this is the rest
            pass
        if output.is_too_long.done():
            return Result(bytes(output.data), 0, "output")
        unread = array.array("i", [0])  # number of bytes that the process has not read
        if ended is None and not output.has_ended:
            fcntl.ioctl(self._program, termios.TIOCOUTQ, unread)
        if ended is None and (output.has_ended or unread[0]):
            return Result(bytes(output.data), 1)  # a closed socket, or a cell that was not read
        return Result(bytes(output.data), ended, reason)

    def end(self) -> None:
        """Let the server kill the process and remove its folder, if it has not ended."""
        self.has_ended = True
        self._program.close()
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the process without waiting."""
        self.end()
        self._end.close()

    async def closed(self) -> None:
        """End the process, and wait until it and its folder are gone."""
        self.end()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            loop, until = asyncio.get_running_loop(), time.monotonic() + END_SECONDS
            while await asyncio.wait_for(loop.sock_recv(self._end, 1 << 12), until - time.monotonic()):
                pass
        self._end.close()


class _Output:
    """The output of a cell, read from a socket while the cell runs."""

    def __init__(self, program: socket.socket):
        self.data, self.has_ended, self._program = bytearray(), False, program
        self.is_too_long = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(program, self.read_part)

    def read_part(self) -> bool:
        """Read once, and return whether there may be more."""
        try:
            part = self._program.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        self.data.extend(part)
        if len(self.data) > MAX_OUTPUT_BYTES and not self.is_too_long.done():
            self.is_too_long.set_result(True)
        if not part:
            self.has_ended = True
            self.stop()
        return bool(part) and not self.is_too_long.done()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._program)
