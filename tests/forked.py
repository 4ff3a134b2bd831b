"""A `python` for the PATH: verl's trainers and the evaluation run in forks of a process that has made their imports.

    subprocess.run(["bash", "recipe/hapo/run_countdown_cpu.sh"], env=with_forks({**os.environ, "DRY_RUN": "1"}))

The imports take ten seconds, a dry run after them one. `python -m verl.…`, `python -m recipe.…` and the scripts that
import verl run in forks of a server of scripts/fork_server; any other `python` is the real one. verl chooses its
platform when it is imported, so that there is a server for each VERL_PLATFORM. They end with the tests' process, or
with the last of them where pytest-xdist runs tests in several, which share them.

    subprocess.run(["python", "engine.py"], env=as_in_a_run(os.environ))

Here every Python process is a fork, those that vLLM starts as well.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from verl.utils.atomic_files import replacing

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts/fork_server"))
import fork_server  # noqa: E402

SECONDS = 300  # time limit of a command
MODULES = (*fork_server.MODULES, "verl.trainer.sft_trainer", "verl.evaluation.main")
SCRIPTS = [f"scripts/{name}.py" for name in "evaluate explore export mcp_tools plot_run read_log view_trees".split()]
# The file that FORKED_COMMANDS names gets a line of JSON for each trainer and evaluation: arguments and environment.
SHIM = """#!{python} -IS
import json, os, sys
program, environment = {python!r}, dict(os.environ)
arguments = " ".join(sys.argv[1:])
if arguments.startswith(("-m verl.", "-m recipe.", *{scripts!r})):
    if "FORKED_COMMANDS" in environment and arguments.startswith(("-m verl.trainer.", "scripts/evaluate.py")):
        with open(environment["FORKED_COMMANDS"], "a") as file:
            file.write(json.dumps([sys.argv[1:], environment]) + "\\n")
    with open({servers!r}) as file:
        server = json.load(file).get(" ".join(environment.get(name, "") for name in {read!r}))
    if server:
        program, environment = {client!r}, environment | server
os.execve(program, [program, *sys.argv[1:]], environment)
"""

# variables that imports read; their values for runs without GPUs, for dry runs of GPU runs, and for these without a hub
READ = ("VERL_PLATFORM", "HF_HUB_OFFLINE")
CPU, GPU, GPU_OFFLINE = ("cpu", "1"), ("", ""), ("", "1")

# a repository's root -> a folder with its `python`, and values of READ -> the variables by which that finds the server
_folders: dict[Path, tempfile.TemporaryDirectory] = {}
_servers: dict[Path, dict[str, dict[str, str]]] = {}
_starting = threading.Lock()


def with_forks(
    environment: Mapping[str, str], servers: Iterable[tuple[str, str]] = (CPU, GPU), root: Path = ROOT
) -> dict[str, str]:
    """The environment with this `python` first on its PATH.

    Args:
        servers: the values of READ with which it is called.
        root: the repository, or a copy of it that PYTHONPATH names, whose modules are imported.
    """
    with _starting:
        if root not in _folders:
            _folders[root], _servers[root] = tempfile.TemporaryDirectory(prefix="forked"), {}
            shim, file = Path(_folders[root].name, "python"), f"{_folders[root].name}/servers.json"
            values = {"python": sys.executable, "client": str(fork_server.CLIENT), "servers": file}
            shim.write_text(SHIM.format(**values, read=READ, scripts=SCRIPTS))
            shim.chmod(0o755)
        folder = _folders[root].name
        environment = {**environment, "PATH": f"{folder}:{environment['PATH']}", "VIRTUAL_ENV": sys.prefix}
        missing = [values for values in servers if " ".join(values) not in _servers[root]]
        for values in missing:
            imports = {name: text for name, text in environment.items() if name not in READ}
            imports |= {name: value for name, value in zip(READ, values, strict=True) if value}
            _servers[root][" ".join(values)] = _server(f"{root} {imports.get('PYTHONPATH')} {values}", imports)
        if missing:  # a `python` of another thread may be reading it
            with replacing(Path(folder, "servers.json")) as unfinished:
                unfinished.write_text(json.dumps(_servers[root]))
    return environment


def _server(name: str, imports: Mapping[str, str]) -> dict[str, str]:
    """The variables by which clients find the server of this name, which another process of the tests may have started.

    It ends when every process has ended that has its lifeline open.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return fork_server.start(None, MODULES, imports)[0]
    shared = Path(tempfile.gettempdir(), f"forked_{run}.json")
    atexit.register(shared.unlink, missing_ok=True)
    with FileLock(f"{shared}.lock"):
        servers = json.loads(shared.read_text()) if shared.exists() else {}
        with suppress(KeyError, OSError):  # never started, or its starter ended before anybody shared it
            variables, lifeline = servers[name]
            os.open(lifeline, os.O_WRONLY)
            return variables
        # Ray's workers end with the process that they take for their raylet: here the one that started all of pytest's
        variables, lifeline = fork_server.start(None, MODULES, {**imports, "RAY_RAYLET_PID": str(os.getppid())})
        shared.write_text(json.dumps(servers | {name: [variables, f"/proc/{os.getpid()}/fd/{lifeline}"]}))
    return variables


def as_in_a_run(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run without GPUs, in which `python` is the client of a fork server."""
    environment = with_forks({**environment, **dict(zip(READ, CPU, strict=True))}, [CPU])
    return environment | _servers[ROOT][" ".join(CPU)] | {"PATH": f"{fork_server.CLIENT.parent}:{environment['PATH']}"}


def torchrun(n_ranks: int, script: str, *arguments: str) -> subprocess.CompletedProcess:
    """The script, a file of the tests, on so many ranks, each a fork.

    It runs as a module: from its path alone it would find upstream's package `tests`.
    """
    module = ".".join(Path(script).relative_to(ROOT).with_suffix("").parts)
    launcher = ["python", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    env = as_in_a_run({**os.environ, "OMP_NUM_THREADS": "1"})
    command = [*launcher, "--module", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, env=env)


def results_of_ranks(ranks: int, script: str, folder: Path) -> list:
    """Run a script on some ranks, and return what each has saved in the folder as its number with the suffix .pt."""
    import torch

    done = torchrun(ranks, script, str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@contextmanager
def ray_of_forks(**options):
    """Ray, started by this process; its workers are forks."""
    import pytest
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in as_in_a_run(os.environ).items():
            patch.setenv(name, value)
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # they would come before the job is known
        patch.setattr(sys, "executable", str(fork_server.CLIENT))
        ray.init(address="local", include_dashboard=False, **options)
    try:
        yield
    finally:
        ray.shutdown()


def run_two_at_a_time(commands: Iterable[tuple[list[str], Mapping[str, str]]]) -> list[subprocess.CompletedProcess]:
    """The commands with their environments, in the repository's root; results in order."""

    def run(command: tuple[list[str], Mapping[str, str]]) -> subprocess.CompletedProcess:
        return subprocess.run(command[0], cwd=ROOT, env=command[1], capture_output=True, text=True, timeout=SECONDS)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, commands))
