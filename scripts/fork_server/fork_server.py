"""Starts the Python processes of a run without GPUs as forks of one process that has already done their imports.

A run has a dozen processes: driver, Ray's workers and agents, vLLM's engine. Each would import torch, transformers,
vLLM and verl, which takes ten seconds of CPU. Here one process, the server, imports them once. The run's Python
interpreter is `forked/python`, a client that sends its command line, environment and open files to the server
and then waits for the fork that runs the command:

    launch.py ── starts ──> server ── imports, one module after the other, and forks in between
    raylet ── starts ──> client ── command line, environment, folder, open files ──> server ── forks ──> worker
                         client <── its and the fork's process id, then exit status ──  server

If a fork cannot run a command (interpreter flags, another environment at import), the client starts the real
interpreter. With GPUs there is no server: a fork must not inherit a CUDA context.

    python scripts/fork_server/fork_server.py bash scripts/quickstart.sh     # a command whose runs share one server
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CLIENT = Path(__file__).resolve().parent / "forked/python"
SOCKET, PYTHON = "FORK_SERVER", "FORK_SERVER_PYTHON"
# modules to import, in the order in which a run needs them
MODULES = (
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "transformers.models.qwen2.modeling_qwen2",
    "verl.workers.rollout.group_rollout",
    "verl.experimental.reward_loop",
    "verl.workers.rollout.engines.top_logprobs_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
# Variables that modules read while they are imported. A process with other values needs a new interpreter.
READ_BY_VERL = ("VERL_PLATFORM", "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS")
READ_BY_IMPORTS = (*READ_BY_VERL, "HF_HUB_OFFLINE", "PYTHONPATH", "VIRTUAL_ENV")
# the first job of a Ray cluster; a run's own cluster has no other
FIRST_JOB = "01000000"
ENVIRONMENT_AT_START = dict(os.environ)


def start(
    log=None, modules: Sequence[str] = MODULES, environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], int]:
    """Start a server that does the imports in `environment` and prints to the file `log`; if this process is itself a
    fork and has all modules, the server is a fork of it, without new imports.

    Return the environment variables for the clients, with the server's address, and an open file descriptor: the server
    ends when no process has this file open any more.
    """
    # the path of a socket has at most 107 bytes
    base = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 78 else None
    folder = Path(tempfile.mkdtemp(prefix="fork_server_", dir=base))  # mode 0700: nobody else may enter it
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    owner, lifeline = os.pipe()  # nobody writes: `owner` is at its end once no process has `lifeline` open
    python = os.environ.get(PYTHON, sys.executable)
    if sys.executable == str(CLIENT) and set(modules) <= sys.modules.keys():
        if os.fork() == 0:
            os.close(lifeline)
            atexit._clear()
            work(listener, owner, modules)
    else:
        files = [listener.fileno(), owner]
        # Ray's C++ part reads these two variables only at import. A worker ends when the process RAY_RAYLET_PID ends:
        # the caller of this function, unless the environment already names a process. Workers notice the end of the
        # real raylet by its socket.
        ray = {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": environment.get("RAY_RAYLET_PID", str(os.getpid()))}
        subprocess.Popen(
            [python, __file__, "--serve", *map(str, files), *modules],
            env={**environment, **ray},
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(owner)
    listener.close()
    return {SOCKET: str(folder / "socket"), PYTHON: python}, lifeline


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """Return a request (see `forked/python`) and this process's descriptors of its files, in the order of `files`."""
    head, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(253 * 4))
    files = array.array("i")
    for _, _, content in ancillary:
        files.frombytes(content)
    size, text = int.from_bytes(head, "little"), b""
    while len(text) < size:
        part = connection.recv(size - len(text))
        if not part:
            for file in files:
                os.close(file)
            raise ConnectionError("a client left before it had asked")
        text += part
    return json.loads(text), list(files)


def has_imported_the_same(request: dict) -> bool:
    """Return whether the request's variables that imports read have the same values as in this server."""
    env = request["env"]
    same_job = env.get("RAY_JOB_ID", FIRST_JOB) == FIRST_JOB
    return same_job and all(env.get(name) == ENVIRONMENT_AT_START.get(name) for name in READ_BY_IMPORTS)


def tell(connection: socket.socket, number: int) -> None:
    """Send a number to the client as 8 bytes."""
    with contextlib.suppress(OSError):  # a client that has ended needs no answer
        connection.sendall(number.to_bytes(8, "little"))


def serve(listener: socket.socket, owner: int, modules: Sequence[str]) -> dict | None:
    """Import the modules one by one, and in between fork for each request.

    Returns:
        in a fork, its request; in the server, None, once no process has the other end of the pipe `owner` open.
    """
    gc.disable()  # imports make a million objects that stay, so garbage collections would free nothing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes, the server included
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server ends with its owner, which nohup may keep alive
    modules = list(modules)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(owner, selectors.EVENT_READ)
    while True:
        if modules:
            import_quietly(modules.pop(0))
        for key, _ in waiting.select(0 if modules else None):
            if key.fileobj == owner:
                shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
                return None
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    request, files = receive(connection)
                except (ConnectionError, ValueError):
                    connection.close()
                    continue
                tell(connection, os.getpid())
                gc.freeze()  # a collection in a fork would copy the pages of everything imported
                child = os.fork() if has_imported_the_same(request) else None
                if child == 0:
                    for open_here in [connection, *(each.fileobj for each in waiting.get_map().values())]:
                        # A socket closed by os.close() would later close another file with the same number.
                        os.close(open_here) if isinstance(open_here, int) else open_here.close()
                    waiting.close()
                    gc.enable()
                    take_place(request, files)
                    return request
                for file in files:
                    os.close(file)
                tell(connection, child or 0)
                if child is None:
                    connection.close()
                else:
                    waiting.register(connection, selectors.EVENT_READ, (connection, child))
                    waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (connection, child))
                continue
            connection, child = key.data
            is_connected = connection.fileno() >= 0  # and so waits for the exit status
            if key.fileobj is not connection:
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(child, 0)
                if is_connected:
                    tell(connection, status)
            elif is_connected:  # clients send nothing after their request: this one has ended
                os.kill(child, signal.SIGKILL)
            if is_connected:
                waiting.unregister(connection)
                connection.close()


def import_quietly(module: str) -> None:
    """Import a module without its warnings; if this fails, print the error and go on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(module)
        except Exception as error:  # a fork that needs the module imports it again and reports the error
            print(f"the fork server could not import {module}: {error!r}", file=sys.stderr)


def end_with_parent(number: int) -> None:
    """Let the kernel send signal `number` to this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def take_place(request: dict, files: list[int]) -> None:
    """Give this fork the files, session, signals, folder and environment that the client's process would have."""
    # If the server is killed, it can no longer end a fork when the fork's client ends.
    end_with_parent(signal.SIGKILL)
    above = max([*request["files"], *files], default=0) + 1
    for i, file in enumerate(files):
        os.dup2(file, above + i)
        os.close(file)
    for i, number in enumerate(request["files"]):
        os.dup2(above + i, number)
        os.close(above + i)
    if request["session"] != os.getsid(0):
        os.setsid()
    elif request["group"] != os.getpgrp():
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.umask(request["umask"])
    os.nice(max(0, request["nice"] - os.nice(0)))
    os.chdir(request["cwd"])
    set_by_imports = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT_AT_START}
    os.environ.clear()
    os.environ.update(set_by_imports | request["env"])


def adapt_modules() -> None:
    """Reset the state in this fork's imported modules that belongs to the server or was read from its environment."""
    sys.executable = str(CLIENT)
    if spawn := sys.modules.get("multiprocessing.spawn"):
        spawn.set_executable(sys.executable)
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        registry._SUBPROCESS_COMMAND[0] = sys.executable
    if raylet := sys.modules.get("ray._raylet"):
        raylet.Config.initialize("")  # Ray's own way to read its variables again
        # vLLM sets process titles with setproctitle, which finds no title after Ray's own copy of it has set one.
        with contextlib.suppress(ImportError):
            importlib.import_module("setproctitle").setproctitle = raylet.setproctitle
    if values := sys.modules.get("prometheus_client.values"):
        values.ValueClass = values.get_value_class()
    if tqdm := sys.modules.get("tqdm.std"):
        # This lock between processes is a semaphore in /dev/shm, which remains when a process is killed.
        tqdm.TqdmDefaultWriteLock.mp_lock = None
    if yaml := sys.modules.get("yaml"):
        # Hydra reads a hundred YAML files: libyaml is ten times as fast as the parser in Python.
        yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if hydra := sys.modules.get("hydra._internal.hydra"):
        # Hydra would compose a run's config twice, the first time only to read `hydra.mode`, which no config sets.
        get_mode = hydra.Hydra.get_mode
        hydra.Hydra.get_mode = lambda self, config_name, overrides: (
            get_mode(self, config_name, overrides) if "hydra.mode" in " ".join(overrides) else None
        )
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = os.getcwd()  # the folder in which a process that is spawned finds the main module
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count()))


def run(request: dict) -> None:
    """Run the request's command line in this fork as `python` would."""
    if raylet := sys.modules.get("ray._raylet"):
        raylet.setproctitle(" ".join(["python", *request["options"], *request["argv"]]))
    unbuffered = "-u" in request["options"]
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=unbuffered)
    sys.stderr.reconfigure(line_buffering=True, write_through=unbuffered)
    target, sys.argv = request["argv"][0], list(request["argv"])
    if "-m" in request["options"]:
        sys.path[0] = os.getcwd()
        sys.modules.pop(target, None)  # the module runs as __main__, so its imported copy is dropped
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif "-c" in request["options"]:
        sys.path[0], sys.argv[0] = "", "-c"
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(target, "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(target))
        runpy.run_path(target, run_name="__main__")


def finish(code: int) -> NoReturn:
    """End the process as the interpreter does, but without clearing modules: that would copy memory shared by forks."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 255)


def work(listener: socket.socket, owner: int, modules: Sequence[str]) -> NoReturn:
    """Run the server; a fork leaves its loop and runs the request."""
    request, code = serve(listener, owner, modules), 0
    if request is not None:
        try:
            adapt_modules()
            run(request)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            code = 1
    finish(code)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        listener, owner, *modules = sys.argv[2:]
        work(socket.socket(fileno=int(listener)), int(owner), modules)
    elif len(sys.argv) < 2:
        sys.exit(__doc__)
    else:
        environment, lifeline = start(subprocess.DEVNULL)
        os.set_inheritable(lifeline, True)  # the server lives until all processes of the command have ended
        path = f"{CLIENT.parent}:{os.environ['PATH']}"
        os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment, "PATH": path})


if __name__ == "__main__":
    main()
