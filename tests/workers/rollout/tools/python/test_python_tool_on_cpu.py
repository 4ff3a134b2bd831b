"""The Python tool as a user sees it: real processes. Hostile programs have a file of their own."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.fresh import python_for
from tests.tables import table
from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.python import confinement
from verl.workers.rollout.tools.python.tool import AHEAD, PythonTool

SLOW = 20  # seconds that an ordinary call may take on a busy machine


class Host:
    """A tool on an event loop of its own."""

    def __init__(self, **params):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.tool = PythonTool(**{"memory_mb": 256, "max_file_mb": 16, "num_workers": 3, **params})

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def call(self, program, timeout=SLOW):
        return self.do(outcome(self.tool, textwrap.dedent(program), timeout))

    def processes(self):
        """Interpreters and their forks."""
        interpreters = [process for process in psutil.Process().children() if "server" in " ".join(process.cmdline())]
        return [*interpreters, *(fork for process in interpreters for fork in process.children(recursive=True))]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.do(self.tool.close())
        self.loop.call_soon_threadsafe(self.loop.stop)


async def outcome(tool, program, timeout=SLOW):
    """(text, kind of error or None)."""
    try:
        return await tool.execute(program, timeout=timeout), None
    except ToolError as error:
        assert error.retry == error.own_fault == (error.kind in ("sandbox", "busy"))
        return str(error), error.kind


@pytest.fixture(scope="module")
def host():
    with Host() as host:
        yield host


def test_results(host):
    call = host.call
    assert call("") == ("", None) and call("x = 1") == ("", None) and call("None") == ("", None)
    assert call("print(1)\n'a'\n[1, 'é', '中', '😀']") == ("1\n[1, 'é', '中', '😀']\n", None)
    assert call("import sys\nprint('o')\nprint('e', file=sys.stderr)\nprint('o')") == ("o\ne\no\n", None)
    assert call("print('a')\nraise SystemExit('bye')") == ("a\nbye\n", None)
    assert call("import os\nos.write(1, b'\\xff')\nos._exit(3)") == ("\ufffd[exit code 3]", None)
    assert call("import ctypes; ctypes.CDLL(None).puts(b'from C'); None") == ("from C\n", None)
    assert call("__name__") == ("'__main__'\n", None) and call("'\\ud800'") == ("'\\ud800'\n", None)


def test_equal_programs_print_their_sets_in_equal_order(host):
    """Trajectories with equal seeds would differ after a call if each run had another hash seed."""
    program = "print({str(i) for i in range(99)})\nimport sys\nprint('' in sys.path, hash('a'))"
    fresh = [sys.executable, "-c", f"import sys\ndel sys.path[0]\n{program}"]
    done = subprocess.run(fresh, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert host.call(program) == (done.stdout, None)


def test_an_exception_is_a_result(host):
    text, kind = host.call("import json\ndef f(x):\n    return json.loads(x)\nprint(1)\nf('{')")
    lines = text.splitlines()
    assert kind is None and lines[:2] == ["1", "Traceback (most recent call last):"]
    assert '  File "<python>", line 3, in f' in lines and "json.decoder.JSONDecodeError: Expecting" in lines[-1]
    assert sys.prefix not in text and sys.base_prefix not in text and "server" not in text
    assert host.call("x = (")[0].splitlines()[-1].startswith("SyntaxError: ")
    assert host.call("x = bytearray(1 << 40)")[0].splitlines()[-1].startswith("MemoryError")


@pytest.mark.parametrize("program", table(__file__, "refused actions"))
def test_a_refused_action_is_told_in_a_sentence(host, program):
    text, kind = host.call(program)
    assert kind is None and text.count(confinement.NOT_ALLOWED) == 1 and "Error" in text


def test_usual_modules_and_calls_work(host):
    assert host.call(
        """
        import asyncio, concurrent.futures, os, shutil, sqlite3, tempfile
        import numpy
        print(numpy.arange(4).reshape(2, 2).dot([1, 2]).tolist())
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            print(sum(pool.map(lambda x: x * x, range(9))))
        with tempfile.NamedTemporaryFile() as file:
            print(file.write(b"abc"))
        with tempfile.TemporaryFile() as file:
            print(file.write(b"abcd"))
        open("a", "w").write("a")
        shutil.copy2("a", "b"), os.rename("b", "c"), os.remove("a")
        print(sorted(os.listdir(".")), open("c").read())
        base = sqlite3.connect("base")
        base.execute("create table t(x)"), base.execute("insert into t values(7)"), base.commit()
        print(base.execute("select * from t").fetchall())
        async def four():
            await asyncio.sleep(0.01)
            return 4
        print(asyncio.run(four()))
        open("/dev/null", "w").write("x")
        """
    ) == ("[2, 8]\n204\n3\n4\n['c'] a\n[(7,)]\n4\n1\n", None)
    assert host.call("import sympy\nx = sympy.Symbol('x')\nsympy.solve(x**2 - 4)") == ("[-2, 2]\n", None)
    draw = "import matplotlib; matplotlib.use('Agg')\nfrom matplotlib import pyplot\npyplot.savefig('a.png')"
    assert host.call(draw) == ("", None)


def test_long_output_loses_its_middle(host):
    text, kind = host.call("print('first')\nprint('é' * 10**6)\nprint('last')")
    assert kind is None and text.startswith("first\n") and text.endswith("é\nlast\n")
    assert "[output truncated: 2000012 bytes were printed" in text and len(text) < 8192 + 100
    assert host.call("print('x' * 8190)")[0] == "x" * 8190 + "\n"
    assert host.call("#" * (2 << 20))[1] == "too_long"


def test_calls_see_nothing_of_each_other(host):
    async def two_then_one():
        write = "import os, math, time\nmath.pi = 3\nopen('left', 'w').write('x')\ntime.sleep(0.3)\nos.listdir('.')"
        look = "import os, math\n(os.listdir('.'), math.pi > 3.1, 'write' in globals())"
        both = await asyncio.gather(outcome(host.tool, write), outcome(host.tool, look))
        return *both, await outcome(host.tool, look)

    empty = ("([], True, False)\n", None)
    assert host.do(two_then_one()) == (("['left']\n", None), empty, empty)


def test_programs_leave_nothing_on_their_standard_input(host):
    leave = "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)"
    look = "import fcntl, os\nfcntl.fcntl(0, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK)"
    assert host.call(leave)[1] is None
    assert [host.call(look) for _ in range(2 * AHEAD)] == 2 * AHEAD * [("0\n", None)]


def test_a_pool_of_threads_that_is_alive_at_the_end_is_no_fault():
    """The main thread exits first; the others are still seen alive while 400 MB are given back."""
    program = """
        import threading, time
        kept = bytearray(b"x") * (400 << 20)
        for _ in range(20): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        len(kept) >> 20"""
    with Host(memory_mb=1024) as roomy:
        assert [roomy.call(program) for _ in range(12)] == [("400\n", None)] * 12


def test_a_call_that_waited_for_its_time_is_not_the_programs_fault():
    async def both():
        hog = asyncio.ensure_future(outcome(other.tool, "import time; time.sleep(60)", 2))
        await asyncio.sleep(0.2)
        _, kind = await outcome(other.tool, "1", 2)
        await hog
        return kind

    with Host(num_workers=1) as other:
        other.call("1")
        assert other.do(both()) == "busy"


def test_limits_of_time(host):
    start = time.monotonic()
    text, kind = host.call("print('so far')\nimport time\ntime.sleep(30)", 1)
    assert kind == "timeout" and "1 seconds" in text and text.endswith("so far\n")
    assert time.monotonic() - start < SLOW
    with Host(cpu_seconds=1) as other:
        text, kind = other.call("while True: pass", 60)
    assert kind == "cpu" and "1 seconds of CPU time" in text


def test_many_calls_at_once_and_cancelled_ones(host):
    async def many():
        return await asyncio.gather(*(outcome(host.tool, f"{i} * 2", 60) for i in range(20)))

    async def cancelled():
        call = asyncio.ensure_future(host.tool.execute("import time; time.sleep(60)", timeout=60))
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    assert host.do(many()) == [(f"{2 * i}\n", None) for i in range(20)]
    host.do(cancelled())
    until = time.monotonic() + SLOW
    while len(host.processes()) > 2 * (1 + AHEAD) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(host.processes()) <= 2 * (1 + AHEAD)


def test_a_lost_interpreter_is_replaced_and_close_ends_everything(host):
    def lose(how):
        async def during_a_call():
            call = asyncio.ensure_future(outcome(host.tool, "import time; time.sleep(60)", 60))
            await asyncio.sleep(0.5)
            everybody = host.processes()
            await how()
            return everybody, await call

        everybody, (_, kind) = host.do(during_a_call())
        assert kind == "sandbox" and psutil.wait_procs(everybody, SLOW)[1] == []
        assert host.call("2") == ("2\n", None)

    async def kill():
        for process in host.processes():
            if process.ppid() == os.getpid():
                process.kill()

    lose(kill)
    lose(host.tool.close)


def test_programs_that_wait_and_are_killed_are_replaced(host):
    """The kernel kills them like this when the machine runs out of memory."""
    host.call("1")
    waiting = [process for process in host.processes() if process.ppid() != os.getpid()]
    for process in waiting:
        process.kill()
    # A process that is still dying takes its program, whose end is then a crash.
    assert waiting and psutil.wait_procs(waiting, SLOW)[1] == []
    kinds = [host.call("6 * 7") for _ in range(2 * AHEAD)]
    assert kinds[-1] == ("42\n", None) and {kind for _, kind in kinds} <= {None, "sandbox"}


PARENT = """
import asyncio, psutil
from verl.workers.rollout.tools.python.tool import PythonTool
async def main():
    tool = PythonTool(session=SESSION, num_workers=2)
    runs = [tool.new_session() if SESSION else tool for _ in range(3)]
    folders = [await run.execute("import os; print(os.getcwd())", timeout=60) for run in runs]
    call = asyncio.ensure_future(runs[0].execute("import time; time.sleep(60)", timeout=60))
    await asyncio.sleep(0.5)
    print(folders[-1], end="")
    print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
    await call
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("session, programs", [(False, 1), (True, 3)])
def test_programs_and_their_files_end_with_a_killed_trainer(session, programs):
    command = python_for(PARENT.replace("SESSION", str(session)))
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    folder = Path(parent.stdout.readline().strip()).parent
    everybody = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(everybody) == 1 + programs + AHEAD and folder.is_dir()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs(everybody, SLOW)[1] == []
    assert not folder.exists()


def test_preload_and_another_interpreter(tmp_path):
    look = "import sys\nprint('fractions' in sys.modules, 'verl' in sys.modules)"
    with Host(preload=["fractions"]) as other:
        assert other.call(look) == ("True False\n", None)  # the text names it
        assert other.call(look.replace("fractions", "frac' + 'tions")) == ("False False\n", None)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "envs" / "some"], check=True)
    with Host(conda_path=str(tmp_path), conda_env="some") as other:
        other.do(other.tool.start(timeout=60))  # the environment has neither numpy nor sympy
        assert other.call("import sys; sys.prefix") == (f"'{tmp_path / 'envs' / 'some'}'\n", None)


def test_the_trial_fails_where_programs_would(tmp_path):
    with pytest.raises(ToolError, match="no_such_module"):
        asyncio.run(PythonTool(preload=["no_such_module"]).start(timeout=60))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ToolError, match="has ended"):
        asyncio.run(PythonTool(python_path=str(broken)).start(timeout=60))


@pytest.mark.parametrize("column, header", [(1, "x86_64-linux-gnu/asm/unistd_64.h"), (2, "asm-generic/unistd.h")])
def test_numbers_of_system_calls(column, header):
    """Against the kernel's own headers, which the compiler brings."""
    file = Path("/usr/include") / header
    if not file.exists():
        pytest.skip(f"no {file}: of another processor, or without linux-libc-dev")
    defined = {}
    for line in file.read_text().splitlines():
        words = line.replace("__NR3264_", "__NR_").split()
        if len(words) >= 3 and words[0] == "#define" and words[1].startswith("__NR_") and words[2].isdigit():
            defined[words[1].removeprefix("__NR_")] = int(words[2])
    for calls in (confinement._ALLOWED, confinement._WITHOUT_EFFECT, *confinement._CHECKED):
        for name, number in confinement.numbers(calls, column).items():
            other = {"newfstatat": "fstatat"}.get(name, name) if column == 2 else name
            # a header older than a system call does not define it
            assert defined.get(other, defined.get(name, number)) == number, name
    assert len(defined) > 250
