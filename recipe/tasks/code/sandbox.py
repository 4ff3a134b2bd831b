"""Runs solutions in the sandboxes of the Python tool, or on a Sandbox Fusion server, from any thread."""

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le
from pydantic.dataclasses import dataclass

from recipe.tasks.code import runner
from verl.workers.config.keys import STRICT
from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.python.session import MAX_OUTPUT_BYTES, PythonSession
from verl.workers.rollout.tools.python.tool import MAX_PROGRAMS, PythonTool

T = TypeVar("T")
RUNNER = Path(runner.__file__).read_text()
ATTEMPTS, WALL_FACTOR = 3, 3  # if the sandbox fails; wall time by CPU time
_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Limits:
    """Limits of a test; tests with `assert` are one test, but the CPU time and the output are those of each call.

    Args:
        timeout_seconds: largest CPU time; the wall time may be three times as long. On a server the wall time.
        memory_limit_mb: largest memory beyond the interpreter's own, in MiB.
        max_output_bytes: largest size of the output.
        num_workers: largest number of programs at once in each of the `reward.num_workers` processes.
        sandbox_fusion_url: address of a Sandbox Fusion server that runs the programs instead.
    """

    timeout_seconds: Annotated[float, Ge(0.1), Le(3600)] = 6.0
    memory_limit_mb: Annotated[int, Ge(64), Le(1 << 20)] = 1024
    max_output_bytes: Annotated[int, Ge(1), Le(MAX_OUTPUT_BYTES)] = 1 << 20
    num_workers: Annotated[int, Ge(1), Le(MAX_PROGRAMS)] = 8
    sandbox_fusion_url: str | None = None


class Sandbox:
    """The sandboxes of this process with these limits. `run` runs its methods."""

    def __init__(self, limits: Limits):
        self.limits, url = limits, limits.sandbox_fusion_url
        settings: dict[str, Any] = {"memory_mb": limits.memory_limit_mb, "num_workers": MAX_PROGRAMS}
        settings |= {"cpu_seconds": math.ceil(limits.timeout_seconds), "max_output_chars": MAX_OUTPUT_BYTES}
        settings |= {"sandbox_fusion_url": url} if url else {"preload": runner.MODULES.split()}
        self.programs = PythonTool(**settings)
        self.sessions = None if url else PythonTool(**settings, session=True)
        self.seconds = limits.timeout_seconds * (1 if url else WALL_FACTOR)
        self.places = asyncio.Semaphore(limits.num_workers if url else min(limits.num_workers, os.cpu_count() or 1))

    async def output(self, call: str) -> bytes | None:
        """Return the output of a call of a function in runner.py; None if it fails or is over a limit."""
        async with self.places:
            program = f"{RUNNER}\n{call}"
            result = await self.programs.run_in_turn(lambda where, *rest: where.run(*rest), program, self.seconds)
        is_good = result.reason is None and result.code == 0 and len(result.output) <= self.limits.max_output_bytes
        return result.output if is_good else None

    async def passes(self, code: str, setup: str, tests: str, entry_point: str | None) -> bool:
        """Return whether a solution passes tests with `assert`, which run in another process than the solution."""
        assert self.sessions is not None, "check_row refuses such tests on a server"
        judge, solver = self.sessions.new_session(), self.sessions.new_session()

        async def last_line(session: PythonSession, call: str) -> str:
            output = await session.execute(call, timeout=self.seconds)
            is_good = len(output.encode()) <= self.limits.max_output_bytes
            return output.rstrip("\n").rpartition("\n")[2] if is_good else "None"

        async def verdict() -> str:
            await last_line(solver, f"{RUNNER}\nsolution = load_solution({code!r}, 'solution')")
            line = await last_line(judge, f"{RUNNER}\nrun_tests({setup!r}, {tests!r}, {entry_point!r})")
            while line.startswith("call "):
                reply = await last_line(solver, f"answer_call(solution, *{line.removeprefix('call ')})")
                line = await last_line(judge, f"go_on({reply!r})")
            return line

        async with self.places, contextlib.aclosing(judge), contextlib.aclosing(solver):
            return await asyncio.wait_for(verdict(), self.seconds) == "passed"


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="code sandbox", daemon=True).start()
    return loop


@cache
def _started(limits: Limits) -> Sandbox:
    sandbox = Sandbox(limits)
    right = run(lambda: sandbox.output("run_program('print(42)', '')")) == b"42\n"
    if (
        not right
        or sandbox.sessions
        and not run(lambda: sandbox.passes("def f(): return 42", "", "assert f() == 42", None))
    ):
        raise RuntimeError("a trial program gave a wrong result")
    return sandbox


def sandbox_of(limits: Limits) -> Sandbox:
    """Return this process's sandbox with these limits. Raise ValueError if it cannot run a trial program."""
    try:
        with _lock:
            return _started(limits)
    except RuntimeError as error:
        raise ValueError(f"code cannot be tested here: {error}") from error


def run(call: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """Run a method of a sandbox and return its result; None if the solution is at fault. Raise RuntimeError if the
    sandbox itself has failed three times."""
    with _lock:
        loop = _loop()
    for _ in range(ATTEMPTS):
        try:
            return asyncio.run_coroutine_threadsafe(call(), loop).result()
        except asyncio.TimeoutError:
            return None
        except ToolError as error:
            if not error.own_fault:
                return None
            failure = error
    raise RuntimeError(f"the sandbox fails: {failure}") from failure
