"""Runs the calls of a tool whose `execute` never awaits in a process of its own, one after the other.

Such a tool computes or blocks. If it holds Python's lock (GIL), as a regular expression that backtracks does, it would
stop its whole rollout worker, and no thread could end it; a process can be killed. The next call gets a new one.

    worker  ── stdin: tool; then a method's name and arguments ──>  python -m verl.workers.rollout.tools.tool_process
    worker  <── stdout: outcome (see `_outcome`)                ──  process
"""

import asyncio
import contextlib
import ctypes
import dis
import importlib.util
import inspect
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verl.utils.moved import present_name
from verl.utils.user_code import guarded
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError

logger = logging.getLogger(__name__)

AWAITS = ("GET_AWAITABLE", "GET_ANEXT", "BEFORE_ASYNC_WITH")
HEAD_BYTES, PR_SET_PDEATHSIG = 8, 1


def never_awaits(function: Callable) -> bool:
    """Return whether a function has no `await`, `async for` or `async with` of its own."""
    return not any(step.opname in AWAITS for step in dis.get_instructions(inspect.unwrap(function)))


class ToolProcess:
    """The methods `start`, `execute` and `close` of a tool, called in its process, one at a time.

    Args:
        tool: the tool as it was made here; its counter of restarts follows the process's.
        name, instance: the tool's entry of `tool_instances`, from which the process makes it again.
    """

    def __init__(self, tool: BaseTool, name: str, instance: Mapping[str, Any]):
        module = present_name(instance["class_path"]).rpartition(".")[0]
        self.tool, self._entry = tool, (name, dict(instance), module, getattr(sys.modules[module], "__file__", None))
        self._process: asyncio.subprocess.Process | None = None
        self.one_call = asyncio.Lock()  # held by the tool box, so that the wait for another call takes no call's time

    async def ready(self) -> None:
        """Start the process, if it does not run, and wait until the tool is made in it."""
        if self._process is None:
            pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
            self._process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, **pipes)
            await self._ask(sys.path, *self._entry)

    async def start(self, *, timeout: float) -> None:
        await self.ready()
        await self._ask("start", (), {"timeout": timeout})

    async def execute(self, content: str, *, timeout: float) -> Any:
        return await self._ask("execute", (content,), {"timeout": timeout})

    async def close(self) -> None:
        if (process := self._process) is not None:
            try:
                await self._ask("close", (), {})
            finally:
                self._kill()
                await process.wait()

    async def _ask(self, *request) -> Any:
        """Send a request and return the outcome; kill the process if this is cancelled, as by a time limit."""
        process, answered = self._process, False
        try:
            data = pickle.dumps(request)
            process.stdin.write(len(data).to_bytes(HEAD_BYTES, "little") + data)
            size = int.from_bytes(await process.stdout.readexactly(HEAD_BYTES), "little")
            value, error, self.tool.restarts = pickle.loads(await process.stdout.readexactly(size))
            answered = True
        except (asyncio.IncompleteReadError, ConnectionError):
            how = f"its process ended with exit code {await process.wait()}"
            raise ToolError(f"{self.tool.name} failed: {how}", kind="crash", retry=False, own_fault=True) from None
        finally:
            if not answered:
                self._kill()
        if error is not None:
            message, attributes = error
            raise ToolError(message, **attributes)
        return value

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None


async def _outcome(tool: BaseTool, method: str, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """Return (value, None) of a call, or (None, (message, keyword arguments of ToolError))."""
    try:
        value = getattr(tool, method)(*args, **kwargs)
        return (await guarded(value, tool.name) if inspect.isawaitable(value) else value), None
    except ToolError as error:
        return None, (str(error), {"kind": error.kind, "retry": error.retry, "own_fault": error.own_fault})
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        logger.exception(f"tool {tool.name} failed")
        kind = type(error).__name__
        return None, (f"{tool.name} failed: {kind}", {"kind": kind, "retry": False, "own_fault": True})


def main() -> None:
    """Make the tool and answer calls until the worker closes stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a call that blocks does not see the worker's end
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the tool prints
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def request() -> tuple:
        head = requests.read(HEAD_BYTES)
        return pickle.loads(requests.read(int.from_bytes(head, "little"))) if head else ()

    def answer(value: Any, error: Any, restarts: int) -> None:
        data = pickle.dumps((value, error, restarts))
        answers.write(len(data).to_bytes(HEAD_BYTES, "little") + data)
        answers.flush()

    from verl.workers.rollout.tools.tool_box import tool_class

    sys.path[:], name, instance, module, file = request()
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:  # the worker has loaded it by its file
        spec = importlib.util.spec_from_file_location(module, file)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    cls, params = tool_class(name, instance)
    tool, loop = cls(**params), asyncio.new_event_loop()
    answer(None, None, tool.restarts)
    while asked := request():
        answer(*loop.run_until_complete(_outcome(tool, *asked)), tool.restarts)


if __name__ == "__main__":
    main()
