"""The python tool as a user sees it, and hostile programs against it: real processes, at each isolation level that the
machine gives. What a level promises is in python_sandbox.py."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from tests.fresh import python_for
from tests.workers.rollout.tools.hostile_programs import PROGRAMS
from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.python_pool import SandboxError
from verl.workers.rollout.tools.python_tool import LEVELS, PythonTool

WORKERS = 3
SECRET = "correct horse battery staple"
SMALL = {"memory_mb": 256, "max_file_mb": 16, "max_processes": 40, "num_workers": WORKERS}
TIMEOUTS = {"memory of many": 15, "deep C recursion": 15}
SLOW = 20  # seconds that an ordinary call may take on a busy machine


def is_supervised(process):
    """Of a python tool, ours or another's on this machine."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("python_worker" in argument for parent in process.parents() for argument in parent.cmdline())
    return True  # it has ended


class Host:
    """A tool on an event loop of its own, and what hostile programs must not reach."""

    def __init__(self, level, directory):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.tool = PythonTool(isolation=level, **SMALL)
        try:
            self.do(self.tool._started())
        except SandboxError as error:
            pytest.skip(f"this machine does not give level {level}: {error}")
        self.secret, self.keep = directory / "secret", directory / "keep" / "file"
        self.keep.parent.mkdir()
        self.secret.write_text(SECRET)
        self.keep.write_text("kept")
        self.sentinel = subprocess.Popen(["sleep", "600"])
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", self.port))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0sandbox-{os.getpid()}")
        self.abstract.listen()
        for sock in (self.listener, self.datagrams, self.abstract):
            sock.setblocking(False)
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.affinity = psutil.Process(self.sentinel.pid).cpu_affinity()

    def do(self, coroutine, seconds=120):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def fill_in(self, program, mark):
        values = {"PARENT": os.getpid(), "SENTINEL": self.sentinel.pid, "PORT": self.port, "SECRET": self.secret}
        values |= {"KEEP": self.keep, "KEEPDIR": self.keep.parent, "MARK": mark, "ABSTRACT": f"sandbox-{os.getpid()}"}
        return re.sub("@([A-Z]+)@", lambda match: str(values[match[1]]), program)

    def processes(self):
        supervisor = psutil.Process(self.tool._pool._process.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def check_unharmed(self):
        assert self.keep.read_text() == "kept" and list(self.keep.parent.iterdir()) == [self.keep]
        assert self.secret.read_text() == SECRET and self.secret.stat().st_nlink == 1
        sentinel = psutil.Process(self.sentinel.pid)
        assert sentinel.status() == psutil.STATUS_SLEEPING and sentinel.cpu_affinity() == self.affinity
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == self.limits
        for sock in (self.listener, self.datagrams, self.abstract):
            with pytest.raises(BlockingIOError):
                sock.recv(1) if sock is self.datagrams else sock.accept()

    def check_nothing_left(self, mark, idle):
        """Only waiting sandboxes below the supervisor; nobody sleeps our mark, no orphan runs as a call's user."""
        until = time.monotonic() + SLOW
        while len(tree := self.processes()) != idle and time.monotonic() < until:
            time.sleep(0.02)
        assert len(tree) == idle
        for process in psutil.process_iter(["cmdline", "uids"]):
            assert str(mark) not in (process.info["cmdline"] or ())
            assert not 61184 <= process.info["uids"].real < 65184 or is_supervised(process)

    def close(self):
        self.do(self.tool.close())
        self.sentinel.kill()
        self.sentinel.wait()
        for sock in (self.listener, self.datagrams, self.abstract):
            sock.close()
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(scope="module", params=LEVELS)
def host(request, tmp_path_factory):
    host = Host(request.param, tmp_path_factory.mktemp("host"))
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    yield host
    del os.environ["SANDBOX_TEST_SECRET"]
    host.close()


@pytest.fixture
def idle(host):
    """Processes of the tool when no call runs: launcher and supervisor, or that alone; a sandbox has two."""
    return (2 if host.tool._pool.level == "namespaces" else 1) + 2 * WORKERS


async def told(tool, program, timeout=SLOW):
    """(text, kind of error or None)."""
    try:
        return await tool.execute(program, timeout=timeout), None
    except ToolError as error:
        assert not error.retry
        return str(error), error.kind


WITNESS = "import time\ntime.sleep(0.2)\nsum(range(100_001))"


async def attack(tool, program, timeout):
    hostile, witness = await asyncio.gather(told(tool, program, timeout), told(tool, WITNESS))
    every_sandbox = [await told(tool, "print('next'); int(6 * 7)") for _ in range(WORKERS)]
    return hostile, witness, every_sandbox


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_programs(host, idle, name):
    mark = 70000 + list(PROGRAMS).index(name)
    program = host.fill_in(PROGRAMS[name], mark)
    start = time.monotonic()
    hostile, witness, afterwards = host.do(attack(host.tool, program, TIMEOUTS.get(name, 1.5)))
    assert witness == ("5000050000\n", None) and afterwards == WORKERS * [("next\n42\n", None)]
    text, kind = hostile
    assert not re.search("^HARM", text, re.MULTILINE) and SECRET not in text and len(text) < 20_000, text
    assert kind in (None, "timeout", "memory", "crash", "output", "cpu"), text
    host.check_unharmed()
    host.check_nothing_left(mark, idle)
    assert time.monotonic() - start < 60


KINDS = {
    "endless loop": {"timeout"},
    "endless loop in C": {"timeout"},
    "sleep, signals ignored": {"timeout"},
    "memory": {"memory"},
    "memory of many": {"memory"},
    "null pointer": {"crash"},
    "abort": {"crash"},
    "flood": {"output"},
    "_exit": {None},
    "atexit": {None},
    "threads that go on": {None},
}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_the_model_is_told_of_a_limit(host):
    timeouts = {name: 1.5 if kinds == {"timeout"} else SLOW for name, kinds in KINDS.items()}
    got = {name: host.do(told(host.tool, PROGRAMS[name], timeouts[name]))[1] for name in KINDS}
    assert {name: kind for name, kind in got.items() if kind not in KINDS[name]} == {}


def test_results(host):
    def result(program):
        return host.do(told(host.tool, textwrap.dedent(program)))

    assert result("") == ("", None) and result("x = 1") == ("", None) and result("None") == ("", None)
    assert result("print(1)\n'a'\n[1, 'é', '中', '😀']") == ("1\n[1, 'é', '中', '😀']\n", None)
    assert result("import sys\nprint('o')\nprint('e', file=sys.stderr)\nprint('o')") == ("o\ne\no\n", None)
    assert result("print('a')\nraise SystemExit('bye')") == ("a\nbye\n", None)
    assert result("import os\nos.write(1, b'\\xff')\nos._exit(3)") == ("\ufffd[exit code 3]", None)
    assert result("import os\nos.close(1)\nprint(1)") == ("[exit code 1]", None)
    assert result("__name__") == ("'__main__'\n", None)
    assert result("'\\ud800'") == ("'\\ud800'\n", None)


def test_equal_programs_print_their_sets_in_equal_order(host):
    """With other hash seeds in each run the trajectories after a call would differ in spite of equal seeds."""
    program = "print({str(i) for i in range(99)})\nimport sys\nprint('' in sys.path, hash('a'))"
    fresh = [sys.executable, "-c", f"import sys\ndel sys.path[0]\n{program}"]
    done = subprocess.run(fresh, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert host.do(told(host.tool, program)) == (done.stdout, None)


def test_an_exception_is_a_result(host):
    text, kind = host.do(told(host.tool, "import json\ndef f(x):\n    return json.loads(x)\nprint(1)\nf('{')"))
    assert kind is None and text.startswith("1\nTraceback (most recent call last):\n")
    assert (
        'File "<python>", line 3, in f' in text and "json.decoder.JSONDecodeError: Expecting" in text.splitlines()[-1]
    )
    assert sys.prefix not in text and sys.base_prefix not in text and "python_worker" not in text
    text, kind = host.do(told(host.tool, "x = ("))
    assert kind is None and text.splitlines()[-1].startswith("SyntaxError: ")


def test_long_output_loses_its_middle(host):
    text, kind = host.do(told(host.tool, "print('first')\nprint('é' * 10**6)\nprint('last')"))
    assert kind is None and text.startswith("first\n") and text.endswith("é\nlast\n")
    assert "[output truncated: 2000012 bytes were printed" in text and len(text) < 8192 + 100
    text, _ = host.do(told(host.tool, "print('x' * 8190)"))
    assert text == "x" * 8190 + "\n"
    with pytest.raises(ToolError, match="longer"):
        host.do(host.tool.execute("#" * (2 << 20), timeout=5))


def test_numpy_processes_and_files(host):
    program = """
        import multiprocessing, numpy, subprocess, tempfile
        print(numpy.arange(4).reshape(2, 2).dot([1, 2]).tolist())
        print(subprocess.run("echo $((6 * 7)) | cat", shell=True, capture_output=True).stdout)
        with tempfile.NamedTemporaryFile() as file:
            print(file.write(b"abc"))
        open("/dev/null", "w").write("x")"""
    assert host.do(told(host.tool, textwrap.dedent(program))) == (
        "[2, 5]\n".replace("[2, 5]", "[2, 8]") + "b'42\\n'\n3\n1\n",
        None,
    )


def test_calls_see_nothing_of_each_other(host):
    async def two_then_one():
        write = "import os, math, time\nmath.pi = 3\nopen('left', 'w').write('x')\ntime.sleep(0.3)\nos.listdir('.')"
        look = "import os, math\n(os.listdir('.'), math.pi > 3.1, 'write' in globals())"
        both = await asyncio.gather(told(host.tool, write), told(host.tool, look))
        return *both, await told(host.tool, look)

    empty = ("([], True, False)\n", None)
    assert host.do(two_then_one()) == (("['left']\n", None), empty, empty)


def test_a_timeout_tells_what_was_printed(host):
    start = time.monotonic()
    text, kind = host.do(told(host.tool, "print('so far')\nimport time\ntime.sleep(30)", 1))
    assert kind == "timeout" and "1 seconds" in text and text.endswith("so far\n")
    assert time.monotonic() - start < SLOW


def test_many_calls_at_once(host, idle):
    async def many():
        return await asyncio.gather(*(told(host.tool, f"{i} * 2", 60) for i in range(20)))

    assert host.do(many()) == [(f"{2 * i}\n", None) for i in range(20)]
    host.check_nothing_left(-1, idle)


def test_cancelling_ends_what_the_call_started(host, idle):
    program = (
        "import os, subprocess, time\nos.setsid if os.fork() else subprocess.run(['sleep', '71234'])\ntime.sleep(60)"
    )

    async def cancelled():
        call = asyncio.ensure_future(host.tool.execute(program, timeout=60))
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    host.do(cancelled())
    host.check_nothing_left(71234, idle)
    assert host.do(told(host.tool, "1")) == ("1\n", None)


def test_a_lost_supervisor_is_replaced(host):
    async def lose():
        call = asyncio.ensure_future(host.tool.execute("import time; time.sleep(60)", timeout=60))
        await asyncio.sleep(0.5)
        for process in reversed(processes):
            process.kill()
        with pytest.raises(ToolError) as error:
            await call
        assert error.value.kind == "sandbox" and error.value.retry

    processes = host.processes()[:2] if host.tool._pool.level == "namespaces" else host.processes()[:1]
    everybody = host.processes()
    host.do(lose())
    assert host.do(told(host.tool, "2")) == ("2\n", None)
    assert psutil.wait_procs(everybody, SLOW)[1] == []


def test_close_ends_everything(host):
    async def close():
        call = asyncio.ensure_future(host.tool.execute("import time; time.sleep(60)", timeout=60))
        await asyncio.sleep(0.5)
        await host.tool.close()
        with pytest.raises(ToolError):
            await call

    host.do(told(host.tool, "1"))
    everybody = host.processes()
    host.do(close())
    assert psutil.wait_procs(everybody, SLOW)[1] == []
    assert host.do(told(host.tool, "3")) == ("3\n", None)  # starts anew


PARENT = """
import asyncio, sys, psutil, os
from verl.workers.rollout.tools.python_tool import PythonTool
async def main():
    tool = PythonTool(isolation=sys.argv[1], num_workers=2)
    await tool.execute("1", timeout=60)
    call = asyncio.ensure_future(tool.execute("import os, time; os.fork(); time.sleep(60)", timeout=60))
    await asyncio.sleep(1)
    print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
    await call
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_die_with_a_killed_trainer(host):
    parent = subprocess.Popen([*python_for(PARENT), host.tool._pool.level], stdout=subprocess.PIPE, text=True)
    everybody = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(everybody) >= 4
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs(everybody, SLOW)[1] == []


def test_cpu_seconds():
    async def spin():
        tool = PythonTool(cpu_seconds=1, num_workers=1)
        try:
            return await told(tool, "while True: pass", 60)
        finally:
            await tool.close()

    text, kind = asyncio.run(spin())
    assert kind == "cpu" and "1 seconds of CPU time" in text


def test_preload_and_another_interpreter(tmp_path):
    async def run(**params):
        tool = PythonTool(num_workers=1, **params)
        try:
            return await told(
                tool, "import sys\nprint('fractions' in sys.modules, sys.version_info[0], 'verl' in sys.modules)"
            )
        finally:
            await tool.close()

    assert asyncio.run(run(preload=["fractions"])) == ("True 3 False\n", None)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "envs" / "some"], check=True)
    tool = PythonTool(conda_path=str(tmp_path), conda_env="some")
    assert tool.python == str(tmp_path / "envs" / "some" / "bin" / "python")
    assert asyncio.run(run(conda_path=str(tmp_path), conda_env="some")) == ("False 3 False\n", None)


def test_a_preload_that_is_not_there():
    async def run():
        await PythonTool(preload=["no_such_module"]).execute("1", timeout=60)

    with pytest.raises(ToolError) as error:
        asyncio.run(run())
    assert "no_such_module" in str(error.value.__cause__)


@pytest.mark.parametrize(
    "params, named",
    [
        ({"python_path": "/no/such/python"}, "python_path"),
        ({"conda_path": "/no/such", "conda_env": "x"}, "/no/such/envs/x/bin/python"),
        ({"conda_path": "/no/such"}, "conda_env"),
        ({"conda_path": "/x", "conda_env": "x", "python_path": "/x"}, "python_path"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"cpu_seconds": 0}, "cpu_seconds"),
        ({"cpu_seconds": 1.5}, "cpu_seconds"),
        ({"max_processes": True}, "max_processes"),
        ({"max_file_mb": -1}, "max_file_mb"),
        ({"max_output_chars": "8"}, "max_output_chars"),
        ({"num_workers": 1000}, "num_workers"),
        ({"preload": "numpy"}, "preload"),
        ({"isolation": "docker"}, "isolation"),
    ],
)
def test_bad_params(params, named):
    with pytest.raises(ValueError, match=named):
        PythonTool(**params)
