"""A `python` for the PATH: verl's trainers and the evaluation run in forks of a process that has made their imports.

    subprocess.run(["bash", "recipe/hapo/run_countdown_cpu.sh"], env=with_forks({**os.environ, "DRY_RUN": "1"}))

The imports take ten seconds, a dry run after them one. `python -m verl.trainer.…` and `python scripts/evaluate.py`
send their arguments, environment, folder and streams to the server, which forks, and end with the fork's exit code; any
other `python` is the real one. verl chooses its platform when it is imported, so that there is a server for each
VERL_PLATFORM. They end with the tests' process.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # until a fork is ended
SHIM = """#!/usr/bin/env bash
case "$*" in "-m verl.trainer."* | "scripts/evaluate.py"*) exec {python} -I -S {file} {folder} "$@" ;; esac
exec {python} "$@"
"""

# a repository's root -> a folder with its `python` and its servers' sockets
_folders: dict[Path, tempfile.TemporaryDirectory] = {}
_servers: dict[str, subprocess.Popen] = {}


def with_forks(
    environment: Mapping[str, str], platforms: Iterable[str] = ("cpu", ""), root: Path = ROOT
) -> dict[str, str]:
    """The environment with this `python` first on its PATH.

    Args:
        platforms: the values of VERL_PLATFORM that occur ("": not set).
        root: the repository, or a copy of it, whose modules are imported.
    """
    if root not in _folders:
        _folders[root] = tempfile.TemporaryDirectory(prefix="forked")
        shim = Path(_folders[root].name, "bin/python")
        shim.parent.mkdir()
        shim.write_text(SHIM.format(python=sys.executable, file=__file__, folder=_folders[root].name))
        shim.chmod(0o755)
    folder = _folders[root].name
    for platform in platforms:
        address = f"{folder}/platform-{platform}"
        if address not in _servers:
            _servers[address] = _start(address, platform, root)
    return {**environment, "PATH": f"{folder}/bin:{environment['PATH']}", "VIRTUAL_ENV": sys.prefix}


def _start(address: str, platform: str, root: Path) -> subprocess.Popen:
    own = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "MODEL_PATH")}
    own |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)} | ({"VERL_PLATFORM": platform} if platform else {})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(8)
        number = listener.fileno()
        command = [sys.executable, __file__, str(number)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root, env=own, pass_fds=[number])


def run_two_at_a_time(commands: Iterable[tuple[list[str], Mapping[str, str]]]) -> list[subprocess.CompletedProcess]:
    """The commands with their environments, in the repository's root; results in order."""

    def run(command: tuple[list[str], Mapping[str, str]]) -> subprocess.CompletedProcess:
        return subprocess.run(command[0], cwd=ROOT, env=command[1], capture_output=True, text=True, timeout=SECONDS)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, commands))


def ask(folder: str, arguments: list[str]) -> int:
    """What the `python` does: have the server run this, and wait for the exit code.

    The file that FORKED_COMMANDS names gets a line of JSON: the arguments and the environment.
    """
    if record := os.environ.get("FORKED_COMMANDS"):
        with open(record, "a") as file:
            file.write(json.dumps([arguments, dict(os.environ)]) + "\n")
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{folder}/platform-{os.environ.get('VERL_PLATFORM', '')}")
        request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [b"%10d" % len(request)], [0, 1, 2])
        server.sendall(request)
        return int(server.makefile().read() or 1)


def serve(listener: socket.socket) -> None:
    """Fork for every request, until the tests' process has ended."""
    imported: set[str] = set()
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        length, streams, _, _ = socket.recv_fds(connection, 10, 3)
        arguments, environment, folder = json.loads(connection.makefile("rb").read(int(length)))
        at = arguments.index("-m") + 1 if "-m" in arguments[:1] else 0
        name, arguments = arguments[at], arguments[at + 1 :]
        if name not in imported:
            imported.add(name)
            _import(name)
        if os.fork() == 0:  # waits for the run
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (child := os.fork()) == 0:
                connection.close()
                return _run(name, arguments, environment, folder, streams)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            connection.sendall(str(code if code >= 0 else 128 - code).encode())
            os._exit(0)
        connection.close()
        for stream in streams:
            os.close(stream)


def _import(name: str) -> None:
    if name.endswith(".py"):
        runpy.run_path(name, run_name="imports")
    else:
        importlib.import_module(name)
        del sys.modules[name]  # it is run, not imported
    gc.collect()
    gc.freeze()  # else the forks copy what the collector looks at


def _run(name: str, arguments: list[str], environment: dict, folder: str, streams: list[int]) -> None:
    """In the fork."""
    signal.alarm(SECONDS)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [name, *arguments]
    code: object = 0
    try:
        if name.endswith(".py"):
            sys.path[0] = os.path.dirname(os.path.abspath(name))
            runpy.run_path(name, run_name="__main__")
        else:
            sys.path[0] = folder
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)  # to end as usual, clearing all modules, takes a second


def _main() -> None:
    if not sys.argv[1].isdigit():
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    sys.path[0] = os.getcwd()
    gc.disable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
