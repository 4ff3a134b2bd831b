"""Runs the calls of a tool whose `execute` never awaits in a process of its own, one after the other.

Such a tool computes or blocks. If it holds Python's lock (GIL), as a regular expression that backtracks does, it would
stop its whole rollout worker, and no thread could end it; a process can be killed. The next call gets a new one.
"""

import asyncio
import dis
import inspect
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from verl.utils.moved import present_name
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError

AWAITS = ("GET_AWAITABLE", "GET_ANEXT", "BEFORE_ASYNC_WITH")


def runs_in_process(cls: type, class_path: str) -> bool:
    """Return whether the `execute` of a tool's class, or of verl's class that it adapts, has no `await`, `async for` or
    `async with`, and a new process can import the class."""
    execute = inspect.unwrap(getattr(cls, "upstream", cls).execute)
    package = present_name(class_path).partition(".")[0]
    found = any(finder.find_spec(package, None) for finder in sys.meta_path)
    return found and not any(step.opname in AWAITS for step in dis.get_instructions(execute))


class ToolProcess:
    """The methods `start`, `execute` and `close` of a tool, called in its process, one at a time. The function `make`
    of a module makes the tool in the process from `options`."""

    def __init__(self, name: str, make: Callable[..., Any], options: tuple):
        self.name, self._make, self._process = name, (make, options), None
        self.one_call = asyncio.Lock()  # held by the tool box, so that the wait for another call takes no call's time

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
        self._pipe.send(("start", (), {"timeout": timeout}))
        await self._answer()

    async def execute(self, content: str, *, timeout: float) -> Any:
        self._pipe.send(("execute", (content,), {"timeout": timeout}))
        return await self._answer()

    async def close(self) -> None:
        if self._process is not None:
            self._pipe.send(("close", (), {}))
            await self._answer()
            self._process.kill()
            self._process.join()

    async def _answer(self) -> Any:
        """Return or raise the outcome of a request; kill the process if this is cancelled, as by a time limit."""
        process, answered = self._process, False
        try:
            value, error = await asyncio.to_thread(self._pipe.recv)
            answered = True
        except (EOFError, OSError):
            process.join()
            how = f"its process ended with exit code {process.exitcode}"
            raise ToolError(f"{self.name} failed: {how}", kind="crash", retry=False, own_fault=True) from None
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
        about = {"kind": error.kind, "retry": error.retry, "own_fault": error.own_fault}
        return None, {"message": str(error), **about}
    except BaseException as error:
        kind = type(error).__name__
        return None, {"message": f"{tool.name} failed: {kind}", "kind": kind, "retry": False, "own_fault": True}
