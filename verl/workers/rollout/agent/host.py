"""Runs agents' programs; a program of its own, which imports nothing of this project (see process.py).

    server ── forks ──> a keeper for each program ── forks ──> the program ── starts ──> anything

A keeper adopts what its program has started, also in sessions of their own, when their parents end (the "child
subreaper" of prctl(2)). It kills them all when the program ends, when it is asked to, and when the rollout worker has
ended, however that happened. If a keeper is killed, its program dies with it, and the server adopts the rest.
"""

import ctypes
import importlib
import json
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

gym = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "gym" / "host.py")))
libc = ctypes.CDLL(None)

PR_SET_CHILD_SUBREAPER = 36
KEPT_BYTES = 64 << 10  # size of the end of each output that is kept
MAX_REASON = 500  # characters
KEEPER_SECONDS = 2.0  # time for the keepers to end what they keep after the rollout worker's end
OUT_OF_MEMORY = r"MemoryError|bad_alloc|[Cc]annot allocate memory"


def load_function(class_path: str) -> Any:
    """Return a function; None for an empty path, of programs that are commands."""
    if not class_path:
        return None
    module, _, name = class_path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ValueError(reason_of(error)) from error
    if not callable(function):
        raise ValueError("it is not a function")
    return function


def reason_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]


def last_line(output: bytes) -> str:
    return (output.decode(errors="replace").strip().splitlines() or [""])[-1].strip()


def become_program(request: Mapping[str, Any], function: Any, outputs: list[int]) -> None:
    """Run the command or the function in this process, a fork of the keeper, and end it. `outputs` are descriptors for
    standard output, standard error, and the function's result or why it failed."""
    try:
        os.setsid()
        with tempfile.TemporaryFile(dir=request["folder"]) as row:
            row.write(request["row"].encode())
            row.seek(0)
            for number, descriptor in enumerate([row.fileno(), *outputs[:2]]):
                os.dup2(descriptor, number)
        set_limit(resource.RLIMIT_CORE, 1)  # 0 would still start a program that receives core dumps
        if request["memory_mb"] is not None:
            set_limit(resource.RLIMIT_DATA, request["memory_mb"] << 20)
        if function is None:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(request["command"][0], request["command"], request["env"])
        os.environ.clear()
        os.environ.update(request["env"])
        tempfile.tempdir = None  # the server's folder, if the import asked for it
        result = gym.result_of(function(json.loads(request["row"]), request["base_url"], request["api_key"]))
        code, text = 0, "" if result is None else str(result)
    except BaseException as error:
        code, text = 1, reason_of(error)
    with open(outputs[2], "wb") as file:
        file.write(text.encode(errors="replace"))
    os._exit(code)


def set_limit(which: int, value: int) -> None:
    """Set a limit; a lower one that is already set stays."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def run(pipe: Connection, request: Mapping[str, Any], function: Any) -> tuple[str, str]:
    """Run a program until it ends or the pipe has a message; return its result and why it failed."""
    keeper, outputs = os.getpid(), [os.pipe() for _ in range(3)]
    if (program := os.fork()) == 0:
        try:
            libc.prctl(gym.PR_SET_PDEATHSIG, signal.SIGKILL)
            pipe.close()
            if os.getppid() == keeper:
                become_program(request, function, [theirs for _, theirs in outputs])
        finally:
            os._exit(1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    kept = {}
    for ours, theirs in outputs:
        os.close(theirs)
        os.set_blocking(ours, False)
        kept[ours] = bytearray()
    ready: Any
    watched: set[Any] = {pipe, woken, *kept}
    while (code := reap(program)) is None:
        for ready in wait(list(watched)):
            if ready is pipe:  # also if the rollout worker has ended
                os.kill(program, signal.SIGKILL)
                return "", "ended from outside"
            if ready == woken:
                os.read(woken, 4096)
            elif not keep(ready, kept[ready]):
                watched.discard(ready)
    end_children()
    for descriptor, end in kept.items():
        while keep(descriptor, end):
            pass
    return answer(code, function is None, *map(bytes, kept.values()))


def answer(code: int, is_command: bool, output: bytes, errors: bytes, returned: bytes) -> tuple[str, str]:
    """Return a program's result and why it failed, from its exit code and the ends of its three outputs."""
    text = returned.decode(errors="replace")
    if code == 0:
        return (last_line(output) if is_command else text), ""
    words = last_line(errors)[-MAX_REASON:]
    ended = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    failed = text or (f"{ended}: {words}" if words else ended)
    return "", "out of memory" if re.search(OUT_OF_MEMORY, failed) else failed


def keep(descriptor: int, end: bytearray) -> int:
    """Read from a pipe, keep the last KEPT_BYTES, and return the number of bytes; 0 if there are none."""
    try:
        chunk = os.read(descriptor, KEPT_BYTES)
    except BlockingIOError:
        return 0
    end += chunk
    del end[:-KEPT_BYTES]
    return len(chunk)


def reap(program: int) -> int | None:
    """Reap the children that have ended; return the program's exit code if it is one of them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def end_children(seconds: float = 0.0) -> None:
    """Kill all children and what is adopted from them, until none is left; before, wait for them to end."""
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):  # raised when there is no child
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for file in Path("/proc").glob("[0-9]*/stat") if time.monotonic() >= deadline else ():
                with suppress(OSError):  # the process has ended
                    if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(file.parent.name), signal.SIGKILL)
            time.sleep(0.002)


def serve(pipe: Connection, function: Any) -> None:
    """Keep a program: answer the pipe's first message with its result and why it failed, after all has ended."""
    libc.prctl(gym.PR_SET_PDEATHSIG, 0)  # the pipe's end is what ends a keeper
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    pipe.send(os.getpid())
    with suppress(EOFError, OSError):  # the rollout worker has ended
        request = pipe.recv()
        try:
            os.mkdir(request["folder"], 0o700)
            ended = run(pipe, request, function)
        except OSError as error:
            ended = "", reason_of(error)
        end_children()
        shutil.rmtree(request["folder"], ignore_errors=True)
        pipe.send(ended)


if __name__ == "__main__":
    server, folder = os.getpid(), os.environ["TMPDIR"]
    os.makedirs(folder, 0o700, exist_ok=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        gym.main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), load_function, serve)
    finally:
        if os.getpid() == server:
            end_children(KEEPER_SECONDS)
            shutil.rmtree(folder, ignore_errors=True)
