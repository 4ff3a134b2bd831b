"""The Python tool: it runs a program that the model wrote, <python>print(6 * 7)</python>, and returns its output, 42.

A program may be hostile, so it runs confined in its own process, or on a Sandbox Fusion server.
"""

import ast
import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass

from verl.workers.config.keys import STRICT, read_keys
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError
from verl.workers.rollout.tools.python.confinement import MAX_THREADS
from verl.workers.rollout.tools.python.sandbox_fusion import SandboxFusion
from verl.workers.rollout.tools.python.session import MAX_OUTPUT_BYTES, PythonSession, Result, SessionProcess

logger = logging.getLogger(__name__)

MAX_CODE_BYTES, START_SECONDS, END_SECONDS = 1 << 20, 120, 10
USUAL_MODULES, AHEAD = ("numpy", "sympy"), 2  # number of processes that wait for a program
FORKED_KEYS = ("memory_mb", "cpu_seconds", "max_file_mb", "session")  # keys that server.py reads
MAX_LIMIT = 1 << 31
MAX_PROGRAMS = 64  # running at once; a socket's buffer holds some 270 messages to the server
SESSION_SUMMARY = (
    "Runs Python code as a cell of a notebook: names, imports and files of earlier calls live on. Returns what it "
    "prints, and the value of a last expression."
)
# The trial program uses a module, a file and a thread; a socket must be refused.
TRIAL = """
import colorsys, socket, threading
try: print(socket.socket())
except OSError: open("six", "w").write("6")
threading.Thread(target=lambda: print(int(open("six").read()) * 7)).start()
while threading.active_count() > 1: pass"""
# -I would remove "" from the path, but would also ignore the hash seed.
_START = "import sys; sys.path[0] = sys.argv.pop(1); import server; main = server.main; del sys.path[0], server; main()"
# With the hash seed, equal programs print sets in equal order. Symbols bound after a fork would be bound every time.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"}
_ENVIRONMENT |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ENVIRONMENT |= {"MALLOC_ARENA_MAX": "1"}  # otherwise each thread takes 64 MiB of a program's address space

Run = Callable[[Any, bytes, float], Awaitable[Result]]  # runs a program, a text in UTF-8, for some seconds


def _unavailable(why) -> ToolError:
    return ToolError(f"The Python sandbox is not available ({why}).", kind="sandbox", retry=True)


@keys_dataclass(frozen=True, config=STRICT)
class PythonKeys:
    """Keys under `params` of the Python tool. The limits hold for each program or cell; memory and files per session.

    Args:
        conda_path, conda_env: folder and environment of the interpreter {conda_path}/envs/{conda_env}/bin/python.
        python_path: path of another interpreter, Python 3.9 or later; the trainer's by default.
        memory_mb: largest memory of a program beyond the interpreter's own, in MiB.
        cpu_seconds: largest CPU time of a program, in seconds.
        max_file_mb: largest size of all files of a program, in MiB.
        max_output_chars: largest number of characters that the model reads; the middle of a longer output is cut.
        num_workers: largest number of programs that run at once; more wait, within their timeout.
        preload: modules imported once for all programs whose text names one of them, and for all sessions; None for
            those of numpy and sympy that the interpreter has.
        sandbox_fusion_url: address of a Sandbox Fusion server that runs the programs instead. Only memory_mb,
            max_output_chars and num_workers apply then, and interpreter, preload and session must be left out.
        session: whether names, imports and files of a trajectory's calls live on for its later calls (session.py).
    """

    conda_path: str | None = None
    conda_env: str | None = None
    python_path: str | None = None
    memory_mb: int = Field(default=1024, ge=64, le=MAX_LIMIT)
    cpu_seconds: int = Field(default=60, ge=1, le=MAX_LIMIT)
    max_file_mb: int = Field(default=64, ge=1, le=MAX_LIMIT)
    max_output_chars: int = Field(default=8192, ge=1, le=MAX_LIMIT)
    num_workers: int = Field(default=16, ge=1, le=MAX_PROGRAMS)
    preload: list[str] | None = None
    sandbox_fusion_url: str | None = None
    session: bool = False

    def __post_init__(self):
        if (self.conda_path is None) != (self.conda_env is None) or (self.conda_path and self.python_path):
            raise ValueError("python_path, conda_path, conda_env: expected the first, or both of the others, or none")
        if not (Path(self.python).is_file() and os.access(self.python, os.X_OK)):
            raise ValueError(f"python_path, or conda_path and conda_env: {self.python} is no interpreter")
        if self.sandbox_fusion_url is not None:
            unused = [name for name in ("conda_path", "conda_env", "python_path", "preload") if getattr(self, name)]
            if unused:
                raise ValueError(f"{', '.join(unused)}: expected none of it beside sandbox_fusion_url")
            if self.session:
                raise ValueError("session: expected false beside sandbox_fusion_url, as such a server has no sessions")

    @property
    def python(self) -> str:
        """Absolute path of the interpreter."""
        conda = self.conda_path and Path(self.conda_path, "envs", self.conda_env, "bin", "python")
        # If this process is a fork, `sys.executable` is the client of scripts/fork_server/fork_server.py.
        path = conda or self.python_path or os.environ.get("FORK_SERVER_PYTHON", sys.executable)
        return os.path.abspath(Path(path).expanduser())


class PythonTool(BaseTool):
    """Runs Python programs as a notebook runs a cell: the last expression's value is printed too.

    A program may be indented as a whole or stand in a Markdown fence. It ends with its main thread, without atexit
    handlers. An exception in it is a result. confinement.NOT_ALLOWED says what is refused. `params`: `PythonKeys`.
    """

    name, trigger_tag, argument = "python", "python", "code"
    summary = "Runs a Python program in a new process and returns what it prints, and the value of a last expression."

    def __init__(self, **params: Any):
        self.keys = keys = read_keys(PythonKeys, params, "params")
        self.has_session, self.must_repeat = keys.session, not keys.session
        self.summary = SESSION_SUMMARY if keys.session else self.summary
        self.preload = list(USUAL_MODULES) if keys.preload is None else keys.preload
        self._places, self._starting = asyncio.Semaphore(keys.num_workers), asyncio.Lock()
        self._interpreters: dict[bool, Interpreter] = {}  # preloaded or not -> interpreter
        self._fusion = None
        if keys.sandbox_fusion_url is not None:
            self._fusion = SandboxFusion(keys.sandbox_fusion_url, memory_mb=keys.memory_mb)

    @classmethod
    def check(cls, **params) -> None:
        cls(**params)

    async def start(self, *, timeout: float) -> None:
        """Run a trial program, without and with the preloaded modules."""
        local = [f"# {names}{TRIAL}" for names in ("", ", ".join(self.preload))]
        for program in local if self._fusion is None else ["print(42)"]:
            printed = await self.execute(program, timeout=timeout)
            if printed != "42\n":
                raise ToolError(f"a trial program printed {printed!r}", kind="sandbox", retry=True)

    async def execute(self, content: str, *, timeout: float) -> str:
        """Return a program's output. It is stopped shortly before the timeout, so that the model can read its output.

        A ToolError of the kinds `timeout`, `cpu`, `disk`, `threads`, `output`, `crash` or `too_long` is the program's
        fault, of `sandbox` or `busy` the tool's, with a retry; a Sandbox Fusion server adds those of `post_json`. With
        `session`, the program is the only cell of a session.
        """
        if self.has_session:
            async with contextlib.aclosing(self.new_session()) as session:
                return await session.execute(content, timeout=timeout)
        return self.answer(await self.run_in_turn(lambda where, *rest: where.run(*rest), content, timeout), timeout)

    def new_session(self) -> PythonSession:
        return PythonSession(self)

    async def run_in_turn(self, run: Run, content: str, timeout: float) -> Result:
        """Wait for a place, and return the result of `run` with an interpreter or server, the program and its
        seconds."""
        if len(code := content.encode("utf-8", "replace")) > MAX_CODE_BYTES:
            raise ToolError(f"The program is longer than {MAX_CODE_BYTES} bytes.", kind="too_long", retry=False)
        loop, margin = asyncio.get_running_loop(), min(0.5, timeout / 10)
        deadline = loop.time() + timeout - margin
        preloaded = self.has_session or any(name.split(".")[0] in content for name in self.preload)
        try:
            async with self._places:
                if deadline - loop.time() < timeout / 2:
                    raise ToolError("Too many programs run at once.", kind="busy", retry=True)
                where = self._fusion or await self._interpreter(preloaded)
                return await run(where, code, max(deadline - loop.time(), 0.01))
        except (OSError, asyncio.TimeoutError) as error:
            raise _unavailable(repr(error)) from error

    def answer(self, result: Result, timeout: float) -> str:
        """Return the text for the model; raise ToolError for a program that was stopped or has ended its process."""
        text, most = result.output.decode("utf-8", "replace"), self.keys.max_output_chars
        if len(text) > most:
            notice = f"\n[output truncated: {len(result.output)} bytes were printed, the middle is left out]\n"
            text = text[: most - most // 2] + notice + text[len(text) - most // 2 :]
        kind = result.reason or ("crash" if (result.code or 0) < 0 else None)
        if self.has_session and result.code is not None:
            kind = kind or "exit"
        if kind is None:
            return text + (f"[exit code {result.code}]" if result.code else "")
        what = {
            "timeout": f"The program ran longer than {timeout:g} seconds and was stopped.",
            "output": f"The program printed more than {MAX_OUTPUT_BYTES >> 20} MiB and was stopped.",
            "disk": f"The program's files need more than {self.keys.max_file_mb} MiB.",
            "threads": f"The program has more than {MAX_THREADS} threads.",
            "cpu": f"The program used more than {self.keys.cpu_seconds} seconds of CPU time.",
            "crash": f"The Python interpreter was ended by signal {-(result.code or 0)}.",
            "exit": f"The program ended the Python interpreter with exit code {result.code}.",
        }[kind] + (" The session has ended." if self.has_session else "")
        raise ToolError(what + (f" Output until then:\n{text}" if text else ""), kind=kind, retry=False)

    async def _interpreter(self, preloaded: bool) -> "Interpreter":
        """Return the interpreter without or with the preloaded modules, and start it if it is not running."""
        async with self._starting:
            interpreter = self._interpreters.get(preloaded)
            if interpreter is None or not interpreter.alive:
                if interpreter is not None:
                    logger.warning(f"python tool: {self.keys.python} has ended and is started again")
                    await self._interpreters.pop(preloaded).close()
                spec = {name: getattr(self.keys, name) for name in FORKED_KEYS}
                spec |= {"optional": self.keys.preload is None, "preload": self.preload if preloaded else []}
                interpreter = Interpreter(self.keys.python, spec)
                if not await interpreter.start():
                    logger.warning("no Landlock: programs of the Python tool see, and leave, files where all users do")
                self._interpreters[preloaded] = interpreter
        return interpreter

    async def close(self) -> None:
        """End all programs and interpreters; a later call starts new ones, but fails with a Sandbox Fusion server."""
        if self._fusion is not None:
            await self._fusion.close()
        async with self._starting:
            while self._interpreters:
                await self._interpreters.popitem()[1].close()


class Interpreter:
    """An interpreter that has made its imports; programs run in confined forks of it, which are made in advance.

    `spec` holds FORKED_KEYS, preload, and optional (whether modules of preload may be missing).
    """

    def __init__(self, python: str, spec: dict):
        self.python, self.spec, self.alive, self._process = python, spec, False, None
        self._waiting: list[tuple[socket.socket, socket.socket]] = []  # program, end: see server.py

    async def start(self) -> int:
        """Start the interpreter and its first forks; return the version of the kernel's Landlock, 0 without Landlock.
        Raise ToolError if it does not start or lacks a module, or if the machine cannot confine a program."""
        self._folder = tempfile.mkdtemp(prefix="python_tool_")
        options = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.DEVNULL, "env": _ENVIRONMENT}
        self._control, theirs = _sockets(socket.SOCK_SEQPACKET)
        command = [self.python, "-s", "-B", "-X", "utf8", "-c", _START, str(Path(__file__).resolve().parent)]
        command += [str(theirs.fileno()), repr(self.spec | {"folder": self._folder})]
        loop, self.alive = asyncio.get_running_loop(), True
        try:
            with theirs:
                options |= {"pass_fds": [theirs.fileno()], "cwd": "/", "start_new_session": True}
                self._process = await asyncio.create_subprocess_exec(*command, **options)
            reply = await asyncio.wait_for(loop.sock_recv(self._control, 1 << 16), START_SECONDS)
            landlock = self.value(reply)
            for _ in range(AHEAD):
                self._fork()
        except BaseException:
            await self.close()
            raise
        return landlock

    def value(self, reply: bytes):
        """Return the value of a reply of server.py; raise ToolError for a string (an error) and for an empty reply."""
        self.alive = self.alive and bool(reply)
        value = ast.literal_eval(reply.decode()) if self.alive else "it has ended"
        if isinstance(value, str):
            raise _unavailable(f"{self.python}: {value}")
        return value

    async def run(self, code: bytes, seconds: float) -> Result:
        """Run a program, as `SessionProcess.run`."""
        with contextlib.closing(SessionProcess(self)) as process:
            return await process.run(code, seconds)

    def lost(self, end: socket.socket) -> ToolError:
        """Return the error of a process that has ended before it read the program, or raise the one that it told."""
        with contextlib.suppress(BlockingIOError):
            self.value(end.recv(1 << 12))
        return _unavailable("its process has ended before it read the program")

    def take_process(self) -> tuple[socket.socket, socket.socket]:
        """Return the sockets of a process (program, end: see server.py), and let the next one be forked."""
        self._fork()
        return self._waiting.pop(0)

    def _fork(self) -> None:
        (program, theirs), (end, its_end) = _sockets(socket.SOCK_STREAM), _sockets(socket.SOCK_SEQPACKET)
        self._waiting.append((program, end))
        with theirs, its_end:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno(), its_end.fileno()])
            except OSError:
                self.value(b"")

    async def close(self) -> None:
        """End all programs and the interpreter, and remove their folders."""
        self.alive = False
        self._control.close()
        for sock in sum(self._waiting, ()):
            sock.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
            except asyncio.TimeoutError:  # an interpreter that is busy with its imports does not end by itself
                self._process.kill()
                await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _sockets(kind: int) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.setblocking(False)
    return ours, theirs
