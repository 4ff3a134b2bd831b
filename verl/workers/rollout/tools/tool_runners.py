"""Runs a tool's coroutines in an event loop of their own, or in a process, so that callers get an answer in time.

`ToolThread`: for tools that might block the rollout worker's event loop or ignore a cancellation. `ToolProcess`: for
tools whose `execute` never awaits, so that it computes or blocks. If it holds Python's lock (GIL), as a regular
expression that backtracks does, no thread could end it; a process is killed.
"""

import asyncio
import dis
import inspect
import multiprocessing
import sys
import threading
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from verl.utils.user_code import guard_tasks, guarded
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError

T = TypeVar("T")
# longest wait, in seconds, for a cancelled call to end
CANCEL_SECONDS = 2.0


class ToolThread:
    """A thread with the event loop of one tool, which starts with the first call. If a call does not end after its
    cancellation, later calls run in a new thread."""

    def __init__(self, name: str):
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        """Call a function in the tool's thread, and return its coroutine's result; cancelling the caller cancels it.

        Raise asyncio.TimeoutError if the coroutine does not end in `seconds`; it is then cancelled, and may ignore
        that. Raise UserCodeExit for an exception that is no `Exception`.
        """
        tasks: list[asyncio.Task | None] = []
        given_up = threading.Event()

        async def in_thread() -> T:
            tasks.append(asyncio.current_task())
            if given_up.is_set():
                raise asyncio.CancelledError
            return await guarded(call(), self.name)

        loop = self._started_loop()
        ended = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(in_thread(), loop))

        async def give_up() -> None:
            given_up.set()
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks if task is not None])
            await asyncio.wait({ended}, timeout=CANCEL_SECONDS)
            if not ended.done():  # a blocked thread or an ignored cancellation: later calls get another thread
                if loop is self._loop:
                    self._loop = None
            elif not ended.cancelled():
                ended.exception()  # retrieved, because asyncio logs an exception that is never retrieved

        try:
            done, _ = await asyncio.wait({ended}, timeout=seconds)
        except asyncio.CancelledError:
            await give_up()
            raise
        if not done:
            await give_up()
            raise asyncio.TimeoutError
        if ended.cancelled():
            raise RuntimeError(f"{self.name} cancelled its own call")
        return ended.result()

    def stop(self) -> None:
        """End the thread after its current step."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            self._loop = asyncio.new_event_loop()
            guard_tasks(self._loop)
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"tool {self.name}", daemon=True)
            self._thread.start()
        return self._loop


AWAITS = ("GET_AWAITABLE", "GET_ANEXT", "BEFORE_ASYNC_WITH")


def runs_in_process(cls: type, class_path: str) -> bool:
    """Return whether the `execute` of a tool's class, or of verl's class that it adapts, has no `await`, `async for` or
    `async with`, and a new process can import the class."""
    execute = inspect.unwrap(getattr(cls, "upstream", cls).execute)
    package = class_path.partition(".")[0]
    can_import = any(finder.find_spec(package, None) for finder in sys.meta_path)
    return can_import and not any(step.opname in AWAITS for step in dis.get_instructions(execute))


class ToolProcess:
    """The methods `start`, `execute` and `close` of a tool, called one at a time in a process, in which a function
    `make` of a module makes the tool from `options`."""

    def __init__(self, name: str, make: Callable[..., Any], options: tuple):
        self.name, self._make, self._process = name, (make, options), None
        self.one_call = asyncio.Lock()  # held by the tool box: waiting for another call takes no call's time

    async def ready(self) -> None:
        """Start the process, if it does not run, and wait until the tool is made in it."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, *self._make), daemon=True)
            self._process.start()
            theirs.close()
            await self._answer()

    async def start(self, *, timeout: float) -> None:
        await self.ready()
        await self._request("start", timeout=timeout)

    async def execute(self, content: str, *, timeout: float) -> Any:
        return await self._request("execute", content, timeout=timeout)

    async def close(self) -> None:
        if self._process is not None:
            await self._request("close")
            self._process.kill()
            self._process.join()

    async def _request(self, method: str, *args, **options) -> Any:
        self._pipe.send((method, args, options))
        return await self._answer()

    async def _answer(self) -> Any:
        """Return or raise the outcome of a request; kill the process if this is cancelled, as by a time limit."""
        process, answered = self._process, False
        try:
            value, error = await asyncio.to_thread(self._pipe.recv)
            answered = True
        except (EOFError, OSError):
            process.join()
            message = f"{self.name} failed: its process ended with exit code {process.exitcode}"
            raise ToolError(message, kind="crash", retry=False, own_fault=True) from None
        finally:
            if not answered:
                process.kill()
                self._process = None
        if error is not None:
            raise ToolError(error.pop("message"), **error)
        return value


def _serve(pipe: Connection, make: Callable[..., Any], options: tuple) -> None:
    """Make the tool and answer requests until the worker ends."""
    tool, loop = make(*options), asyncio.new_event_loop()
    outcome: tuple = None, None
    while True:
        pipe.send(outcome)
        try:
            request = pipe.recv()
        except EOFError:
            return
        outcome = loop.run_until_complete(_outcome(tool, *request))


async def _outcome(tool: BaseTool, method: str, args: tuple, options: dict) -> tuple[Any, dict | None]:
    """Return a call's value and None, or None and the arguments of a ToolError."""
    try:
        value = getattr(tool, method)(*args, **options)
        return (await value if inspect.isawaitable(value) else value), None
    except ToolError as error:
        return None, {"message": str(error), "kind": error.kind, "retry": error.retry, "own_fault": error.own_fault}
    except BaseException as error:
        kind = type(error).__name__
        return None, {"message": f"{tool.name} failed: {kind}", "kind": kind, "retry": False, "own_fault": True}
