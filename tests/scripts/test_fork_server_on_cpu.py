"""Processes that are forks of a server behave as if the interpreter had started them."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.forked import as_in_a_run, fork_server
from tests.tables import table

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "scripts/fork_server/fork_server.py"


@pytest.fixture(scope="module")
def served():
    """The environment of the clients of a server that has imported `colorsys`."""
    environment, lifeline = fork_server.start(subprocess.DEVNULL, ["colorsys"])
    yield {**os.environ, **environment}
    os.close(lifeline)
    folder = Path(environment[fork_server.SOCKET]).parent
    for _ in range(100):
        if not folder.exists():
            break
        time.sleep(0.1)
    assert not folder.exists(), "the server ends with its owner, and leaves nothing"


def python(served, *arguments, executable=fork_server.CLIENT, **options):
    defaults = {"env": served, "text": True, "capture_output": True, "timeout": 30}
    return subprocess.run([str(executable), *arguments], **(defaults | options))


TELL = "import os, sys; print(sys.argv, sys.path[0], __name__, os.getcwd(), sys.stdin.read(), sep='|')"


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_a_fork_tells_what_the_interpreter_tells(served, tmp_path, how):
    (tmp_path / "tell.py").write_text(TELL)
    arguments = {"script": ["-u", "tell.py"], "-m": ["-m", "tell"], "-c": ["-c", TELL]}[how]
    options = {"cwd": tmp_path, "input": "ünï", "env": served | {"ODD": "a\nb"}}
    ours = python(served, *arguments, "--flag", "ö ", **options)
    theirs = python(served, *arguments, "--flag", "ö ", executable=sys.executable, **options)
    our_end, their_end = ((run.returncode, run.stdout, run.stderr) for run in (ours, theirs))
    assert our_end == their_end != (0, "", "")


@pytest.mark.parametrize("code", table(__file__, "a client ends like its fork"))
def test_a_client_ends_like_its_fork(served, code):
    ours, theirs = python(served, "-c", code), python(served, "-c", code, executable=sys.executable)
    assert ours.returncode == theirs.returncode
    killed = ours.returncode == -signal.SIGKILL  # a case in which the interpreter prints nothing
    assert killed == ("died, often because memory ran out" in ours.stderr)
    assert killed or ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]


def test_a_fork_has_the_imports_and_a_random_state_of_its_own(served):
    code = "import sys, random; print('colorsys' in sys.modules, random.random())"
    (imported, first), (_, second) = (python(served, "-c", code).stdout.split() for _ in range(2))
    assert imported == "True" and first != second


def test_environment_umask_open_files_and_threads_are_the_clients(served):
    reading, writing = os.pipe()
    code = f"import os; os.write({writing}, b'x'); print(os.environ['A'], oct(os.umask(0)))"
    umask = os.umask(0o027)
    try:
        result = python(served, "-c", code, env=served | {"A": "b"}, pass_fds=[writing])
    finally:
        os.umask(umask)
    assert result.stdout.split() == ["b", "0o27"] and os.read(reading, 1) == b"x"
    os.close(reading), os.close(writing)


@pytest.mark.parametrize("bytecode", ["", "1"])  # multiprocessing passes -B on to what it spawns
def test_processes_that_a_fork_spawns_are_forks_too(served, tmp_path, bytecode):
    (tmp_path / "spawning.py").write_text(
        "import multiprocessing as m, sys\n"
        "def tell(): print('colorsys' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    p = m.get_context('spawn').Process(target=tell); p.start(); p.join(); print(p.exitcode)"
    )
    output = python(served, str(tmp_path / "spawning.py"), env=served | {"PYTHONDONTWRITEBYTECODE": bytecode})
    assert output.stdout.split() == ["True", "0"], output.stderr


def test_a_forks_run_is_composed_once_unless_its_mode_is_given():
    code = "from unittest.mock import Mock; from hydra._internal.hydra import Hydra\n"
    code += "print([Hydra.get_mode(Mock(), 'run', [value]) is None for value in ('a=1', 'hydra.mode=RUN')])"
    assert python(as_in_a_run(os.environ), "-c", code, timeout=120).stdout == "[True, False]\n"


@pytest.mark.parametrize("difference", ["flag", "platform", "modules", "job", "no server"])
def test_the_interpreter_runs_commands_that_a_fork_cannot(served, difference):
    code, flags = "import sys; print(sys.executable)", ["-I"] if difference == "flag" else []
    environments = {"platform": {"VERL_PLATFORM": "x"}, "modules": {"VERL_USE_EXTERNAL_MODULES": "x"}, "flag": {}}
    environments |= {"job": {"RAY_JOB_ID": "ffffffff"}, "no server": {fork_server.SOCKET: "/nowhere"}}
    environment = served | environments[difference]
    assert python(served, *flags, "-c", code, env=environment).stdout.strip() == sys.executable
    assert python(served, "-c", code).stdout.strip() == str(fork_server.CLIENT)


def begin(served, code) -> tuple[subprocess.Popen, psutil.Process]:
    code = f"import os, sys; print(os.getpid(), flush=True); {code}"
    client = subprocess.Popen([fork_server.CLIENT, "-c", code], env=served, stdout=subprocess.PIPE, text=True)
    return client, psutil.Process(int(client.stdout.readline()))


def test_a_fork_dies_with_its_client(served):
    client, fork = begin(served, "import time; time.sleep(60)")
    client.kill()
    client.wait()
    psutil.wait_procs([fork], timeout=10)
    assert not fork.is_running()


def test_forks_die_with_a_server_that_is_killed_and_the_client_names_it():
    environment, lifeline = fork_server.start(subprocess.DEVNULL, ["colorsys"])
    command = [str(fork_server.CLIENT), "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    options = {"env": {**os.environ, **environment}, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **options) as client:
        fork = psutil.Process(int(client.stdout.readline()))
        server = fork.parent()
        server.kill()
        _, errors = client.communicate(timeout=30)
        psutil.wait_procs([fork], timeout=10)
    os.close(lifeline)
    assert client.returncode == 1 and f"error: the fork server (process {server.pid} on " in errors
    assert not fork.is_running()


def test_processes_that_outlive_their_run_end_without_an_error(tmp_path):
    environment, lifeline = fork_server.start(subprocess.DEVNULL, ["colorsys"])
    options = "stdout=subprocess.PIPE, stderr=open(sys.argv[1], 'w')"
    waits = "import time; print(flush=True); time.sleep(60)"
    code = f"import subprocess, sys; left = subprocess.Popen([sys.executable, '-c', '{waits}'], {options})"
    command = [fork_server.CLIENT, "-c", f"{code}; left.stdout.readline(); print(left.pid)", tmp_path / "errors"]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=30)
    left = psutil.Process(int(result.stdout))
    os.close(lifeline)
    psutil.wait_procs([left], timeout=10)
    assert not left.is_running() and (tmp_path / "errors").read_text() == ""


def test_a_fork_gets_its_clients_signals(served):
    code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True)"
    code += "; any(time.sleep(0.1) for _ in range(600))"  # Python may miss a signal just before it sleeps
    client, _ = begin(served, code)
    client.stdout.readline()
    client.send_signal(signal.SIGTERM)
    assert client.wait(10) == 7


def test_a_client_that_leaves_before_it_has_asked_does_no_harm(served):
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(served[fork_server.SOCKET])
        rude.send((100).to_bytes(8, "little"))
    assert python(served, "-c", "print('on')").stdout == "on\n"


def test_nobody_else_may_ask_the_server(served):
    assert Path(served[fork_server.SOCKET]).parent.stat().st_mode & 0o777 == 0o700


RAY = """
import os, sys, ray
ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"A": "b"}})
@ray.remote
class Actor:
    def tell(self):
        imported = "verl.trainer.main_ppo" in sys.modules
        return sys.executable, ray.get_runtime_context().get_job_id(), os.environ["A"], imported
print(*ray.get(Actor.remote().tell.remote(), timeout=60))
ray.shutdown()
"""


@pytest.mark.slow
def test_a_command_and_all_that_it_starts_share_a_server_and_rays_workers_are_its_forks(tmp_path):
    """Fails when Ray no longer reads the job and the raylet where the server gives them (Ray 2.60)."""
    (tmp_path / "on_ray.py").write_text(RAY)
    tell = "python -c 'import sys; print(sys.executable)'"
    command = f"{tell}; python {tmp_path}/on_ray.py; python {SERVER} {tell}"
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "RAY_prestart_worker_first_driver": "0"}
    result = subprocess.run(
        [sys.executable, SERVER, "bash", "-c", command], env=environment, text=True, capture_output=True, timeout=180
    )
    client = str(fork_server.CLIENT)
    assert result.stdout.split() == [client, client, fork_server.FIRST_JOB, "b", "True", client], result.stderr


def test_a_hangup_ends_neither_the_server_nor_a_fork_under_nohup(served):
    """A terminal that is closed sends SIGHUP to all processes of its session."""
    code = "import os, sys; print(os.getpid(), os.getppid(), flush=True); sys.stdin.read(); print('went on')"
    ignoring = {"env": served, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ignoring["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    client = subprocess.Popen([fork_server.CLIENT, "-c", code], **ignoring)
    fork, server = map(int, client.stdout.readline().split())
    for process in (server, fork, client.pid):
        os.kill(process, signal.SIGHUP)
    time.sleep(0.3)
    out, _ = client.communicate("", timeout=30)
    assert (client.returncode, out) == (0, "went on\n")
    # the tests themselves may run under nohup
    hearing = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)}
    heard = python(served, "-c", "import os; os.kill(os.getpid(), 1)", **hearing)
    assert heard.returncode == -signal.SIGHUP
