"""The python tool: runs a program that the model wrote and gives what it printed.

    <python>                                  -> "1 1\\n3\\n"
    a, b = 1, 1
    print(a, b)
    a + 2 * b
    </python>

The program is hostile: it runs confined (python_sandbox.py), in a process forked for it alone (python_worker.py), or on
a Sandbox Fusion server (sandbox_fusion.py).
"""

import asyncio
import logging
import signal
from collections.abc import Sequence

from verl.workers.rollout.tools.base_tool import BaseTool, ToolError
from verl.workers.rollout.tools.python_cell import OUT_OF_MEMORY
from verl.workers.rollout.tools.python_pool import SET_UP_FAILED, Ended, Output, SandboxError, SandboxPool, executable
from verl.workers.rollout.tools.sandbox_fusion import SandboxFusion

logger = logging.getLogger(__name__)

MAX_CODE_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 32 << 20  # printed in all, kept or not; then the program is stopped
LEVELS = ("namespaces", "process")


class PythonTool(BaseTool):
    """Runs Python programs, as a notebook runs a cell: the last expression's value is printed too.

    Args:
        conda_path, conda_env: the interpreter is {conda_path}/envs/{conda_env}/bin/python.
        python_path: any interpreter from 3.8 on, instead; default the trainer's.
        memory_mb: MiB of address space for each process, and of resident memory for all processes of a call.
        cpu_seconds: for each process of a call.
        max_processes: processes and threads of a call.
        max_file_mb: MiB of a file; of all files of a call in level `namespaces`.
        max_output_chars: characters that the model reads; of a longer output the middle is left out.
        num_workers: programs that run at once; more wait, within their timeout.
        preload: modules imported before any program starts; costs their memory once.
        isolation: `namespaces`, `process` (see python_sandbox.py), or `auto`: the strongest that the machine gives.
        sandbox_fusion_url: programs run on this Sandbox Fusion server instead. Of the other arguments memory_mb,
            max_output_chars and num_workers apply, the rest must be left out: interpreter, isolation and limits are the
            server's.

    A program ends with its main thread: no atexit handlers, no waiting for other threads or processes. Its last
    newlines are kept. An exception in it is a result like any other.

    Raises:
        ValueError: a value out of range; an interpreter that is not there.
    """

    name, trigger_tag = "python", "python"

    def __init__(
        self,
        conda_path: str | None = None,
        conda_env: str | None = None,
        python_path: str | None = None,
        *,
        memory_mb: int = 1024,
        cpu_seconds: int = 60,
        max_processes: int = 64,
        max_file_mb: int = 64,
        max_output_chars: int = 8192,
        num_workers: int = 16,
        preload: Sequence[str] = (),
        isolation: str = "auto",
        sandbox_fusion_url: str | None = None,
    ):
        self.python = executable(python_path, conda_path, conda_env)
        self.limits = {
            "memory_mb": _at_least("memory_mb", memory_mb, 64),
            "cpu_seconds": _at_least("cpu_seconds", cpu_seconds, 1),
            "max_processes": _at_least("max_processes", max_processes, 1),
            "max_file_mb": _at_least("max_file_mb", max_file_mb, 1),
        }
        self.max_output_chars = _at_least("max_output_chars", max_output_chars, 1)
        self.num_workers = _at_least("num_workers", num_workers, 1, 256)
        if isinstance(preload, str) or not all(isinstance(module, str) for module in preload):
            raise ValueError(f"preload={preload!r}: expected a list of modules' names")
        self.preload = list(preload)
        if isolation not in ("auto", *LEVELS):
            raise ValueError(f"isolation={isolation!r}: expected auto, {' or '.join(LEVELS)}")
        self.levels = LEVELS if isolation == "auto" else (isolation,)
        self._pool: SandboxPool | None = None
        self._starting = asyncio.Lock()
        self._fusion: SandboxFusion | None = None
        if sandbox_fusion_url is not None:
            local = {"conda_path": conda_path, "conda_env": conda_env, "python_path": python_path, "preload": preload}
            if unused := [name for name, value in local.items() if value] + ["isolation"] * (isolation != "auto"):
                raise ValueError(f"{', '.join(unused)}: expected none of it beside sandbox_fusion_url")
            self._fusion = SandboxFusion(sandbox_fusion_url, memory_mb=memory_mb, at_once=num_workers)

    @classmethod
    def check(cls, **params) -> None:
        """All arguments are in order, and the interpreter is there."""
        cls(**params)

    async def execute(self, content: str, *, timeout: float) -> str:
        """What a program prints.

        Args:
            timeout: seconds, with the wait for a free sandbox; the program itself is stopped a little earlier, so that
                the model reads what it had printed.

        Raises:
            ToolError: kinds `timeout`, `cpu`, `memory`, `output`, `crash`, `too_long`: the program's own fault, no
                retry. `sandbox`: ours, retry. Of a server: those of sandbox_fusion.py too.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout - min(0.5, timeout / 10)
        code = content.encode("utf-8", "replace")
        if len(code) > MAX_CODE_BYTES:
            raise ToolError(f"The program is longer than {MAX_CODE_BYTES} bytes.", kind="too_long", retry=False)
        keep = 4 * self.max_output_chars
        if self._fusion is not None:
            margin = loop.time() + timeout - deadline
            text = code.decode()
            return self._answer(*await self._fusion.run(text, deadline=deadline, margin=margin, keep=keep), timeout)
        try:
            sandbox = await (await self._started()).take()
            seconds = max(deadline - loop.time(), 0.01)
            output, ended = await sandbox.run(code, seconds=seconds, max_bytes=MAX_OUTPUT_BYTES, keep=keep)
        except SandboxError as error:
            raise ToolError("The Python sandbox is not available.", kind="sandbox", retry=True) from error
        return self._answer(output, ended, timeout)

    def _answer(self, output: Output, ended: Ended, timeout: float) -> str:
        text = output.text(self.max_output_chars)
        limits = self.limits
        if ended.code == SET_UP_FAILED:
            raise ToolError("The Python sandbox is not available.", kind="sandbox", retry=True)
        if ended.reason == "timeout":
            kind, what = "timeout", f"The program ran longer than {timeout:g} seconds and was stopped."
        elif ended.reason == "output":
            kind, what = "output", f"The program printed more than {MAX_OUTPUT_BYTES >> 20} MiB and was stopped."
        elif ended.reason == "memory" or ended.code == OUT_OF_MEMORY:
            kind, what = "memory", f"The program needs more than {limits['memory_mb']} MiB of memory."
        elif ended.code == -signal.SIGKILL and ended.cpu_seconds > 0.9 * limits["cpu_seconds"]:
            kind, what = "cpu", f"The program used more than {limits['cpu_seconds']} seconds of CPU time."
        elif ended.code < 0:
            kind, what = "crash", f"The Python interpreter was ended by signal {-ended.code}."
        else:
            return text + (f"[exit code {ended.code}]" if ended.code else "")
        raise ToolError(what + (f" Output until then:\n{text}" if text else ""), kind=kind, retry=False)

    async def _started(self) -> SandboxPool:
        if self._pool is not None and self._pool.alive:
            return self._pool
        async with self._starting:
            if self._pool is None or not self._pool.alive:
                await self.close()
                self._pool = await self._start()
        return self._pool

    async def _start(self) -> SandboxPool:
        failures: list[str] = []
        for level in self.levels:
            pool = SandboxPool(self.python, level, self.limits, self.preload, self.num_workers)
            try:
                await pool.start()
            except SandboxError as error:
                failures.append(str(error))
                continue
            missing = [*pool.missing, *failures]
            logger.warning(
                f"python tool: {self.python}, isolation level {level}; missing: {', '.join(missing) or 'nothing'}"
            )
            return pool
        raise SandboxError(f"{self.python}: no isolation level works: {'; '.join(failures)}")

    async def close(self) -> None:
        """End all programs and sandboxes. A later call starts anew, unless on a server."""
        if self._fusion is not None:
            await self._fusion.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()


def _at_least(name: str, value: int, low: int, high: int = 1 << 31) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: expected a whole number from {low} to {high}")
    return value
