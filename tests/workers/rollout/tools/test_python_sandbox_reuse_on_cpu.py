"""What a call of the python tool leaves behind, and that the next call sees none of it.

The tool has one sandbox here, so that the next call gets the namespaces of the last one, or new ones in their place. A
program that leaves something runs between two runs of a program that looks for it.
"""

import asyncio
import itertools
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import verl.workers.rollout.tools.python_tool
from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.python_pool import SandboxError
from verl.workers.rollout.tools.python_tool import PythonTool

TOOLS = str(Path(verl.workers.rollout.tools.python_tool.__file__).parent)
NAMESPACES = "import os; [os.readlink('/proc/self/ns/' + name) for name in ('mnt', 'pid', 'user')]"
FILES = "import os; os.listdir('.'), os.listdir('/dev/shm'), os.statvfs('.')[2:8], os.listxattr('.')"
FILES += ", [getattr(os.stat('.'), 'st_' + key) for key in ('mode', 'uid', 'gid', 'nlink', 'size')]"
PROCESSES = "import os; sorted(name for name in os.listdir('/proc') if name not in ('1', str(os.getpid())))"
NEW_INODE = "import os; open('new', 'w'); os.stat('new').st_ino"
FEW_PIDS = "import os; os.getpid() < 9"
_IGNORING = "\nexcept OSError: pass"

# what is left: (the program that leaves it, the program that looks for it, whether the sandbox may be used again)
LEFT = {
    "nothing": ("sum(range(9))", FILES, True),
    "an exception": ("1 / 0", PROCESSES, True),
    "exit code": ("import os; os._exit(7)", FILES, True),
    "death": ("import os; os.abort()", FILES, True),
    "a file": ("open('a', 'w').write('x' * 5000)", FILES, False),
    "a file in shared memory": ("open('/dev/shm/a', 'w').write('x')", FILES, False),
    "a file by the name of the probe": ("open('probe', 'w').write('x')", FILES, False),
    "a full file system": ("import os\nfor i in range(30000): os.mkdir(str(i))", FILES, False),
    "a directory that nobody may enter": ("import os; os.makedirs('a/b'); os.chmod('a', 0)", FILES, False),
    "a deleted file": ("import os; open('a', 'w'); os.remove('a')", NEW_INODE, False),
    "a file without a name": ("import os; os.open('.', os.O_TMPFILE | os.O_RDWR)", NEW_INODE, False),
    "mode of /tmp": ("import os\ntry: os.chmod('.', 0o777)" + _IGNORING, FILES, None),
    "attributes of /tmp": ("import os\ntry: os.setxattr('.', 'user.a', b'b')" + _IGNORING, FILES, None),
    "times of /tmp": (
        "import os\ntry: os.utime('.', (1, 1))" + _IGNORING,
        "import os, time; [time.time() - os.stat('.').st_mtime < 99, time.time() - os.stat('.').st_atime < 99]",
        None,
    ),
    "times of a device": (
        "import os\ntry: os.utime('/dev/null')" + _IGNORING,
        "import os; [getattr(os.stat('/dev/null'), key) for key in ('st_mtime_ns', 'st_atime_ns', 'st_ctime_ns')]",
        True,
    ),
    "shared memory": (
        "from multiprocessing import shared_memory as s; m = s.SharedMemory('a', create=True, size=99); m.buf[0] = 1",
        "from multiprocessing import shared_memory as s\n"
        "try: print(s.SharedMemory('a').buf[0])\nexcept FileNotFoundError: print('none')",
        False,
    ),
    "a process": ("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(60)", PROCESSES, False),
    "a process that has ended": ("import os\nif os.fork() == 0: os._exit(0)\nos.wait()", FEW_PIDS, False),
    "a hundred numbers of processes": (
        "import os\nfor _ in range(100):\n    if os.fork() == 0: os._exit(0)\n    os.wait()",
        FEW_PIDS,
        False,
    ),
    "a thread": ("import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()", PROCESSES, False),
    "modules, built-ins, environment": (
        "import builtins, json, math, os, sys\nmath.pi = 3; builtins.left = 1; os.environ['LEFT'] = '1'\n"
        "sys.path.append('/left'); json.dumps = None; sys.setrecursionlimit(99); os.umask(0o777); os.chdir('/usr')",
        "import builtins, json, math, os, sys\nos.environ.get('LEFT'), math.pi, hasattr(builtins, 'left'), sys.path, "
        "json.dumps(1), sys.getrecursionlimit(), os.umask(0), os.getcwd(), sorted(os.environ)",
        True,
    ),
    "limits and signals": (
        "import os, resource, signal\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "signal.signal(15, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, [10]); signal.alarm(1)",
        "import os, resource, signal\nresource.getrlimit(resource.RLIMIT_NOFILE), signal.getsignal(15), "
        "signal.pthread_sigmask(0, []), signal.alarm(0)",
        True,
    ),
    "flags of descriptors": (
        "import fcntl, os\nfor fd in range(3): fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)",
        "import fcntl, os\n[fcntl.fcntl(fd, fcntl.F_GETFL) for fd in range(3)], os.listdir('/proc/self/fd')",
        True,
    ),
    "identities of a user namespace": (
        "try: open('/proc/self/projid_map', 'w').write('0 7 1')" + _IGNORING,
        "open('/proc/self/projid_map').read()",
        True,
    ),
    "settings of processes": (
        "for name in ('comm', 'oom_score_adj', 'coredump_filter', 'timerslack_ns', 'autogroup', 'loginuid'):\n"
        "    try: open('/proc/self/' + name, 'w').write('7')\n    except OSError: pass",
        "[open('/proc/self/' + name).read() for name in ('comm', 'oom_score_adj', 'coredump_filter')]",
        True,
    ),
    "signals to the first process": (
        "import os\nfor number in range(1, 65):\n    try: os.kill(1, number); print('sent')\n    except OSError: pass\n"
        "try: os.kill(-1, 9)" + _IGNORING,
        PROCESSES,
        True,
    ),
    "signals to the group": ("import os, signal\nfor number in (19, 9): os.killpg(0, number)", PROCESSES, None),
    "a death with the group": ("import os; os.killpg(0, 9)", PROCESSES, True),
    "a session of its own": ("import os; os.setsid()", "import os; os.getsid(0) == os.getpgid(0) != os.getpid()", True),
    "a name for a socket": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "for act in (lambda: a.bind('\\0left'), lambda: a.bind('left'), lambda: a.connect('\\0left'), a.listen,\n"
        "            lambda: a.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)):\n"
        "    try: act(); print('done')\n    except OSError: pass",
        FILES,
        True,
    ),
    "descriptors on their way": (
        "import array, os, socket\nfd = os.open('.', os.O_TMPFILE | os.O_RDWR); s = socket.socket(fileno=1)\n"
        "for _ in range(50): s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [fd]))])",
        FILES,
        False,
    ),
}


class Single:
    """A tool with one sandbox, on an event loop of its own."""

    def __init__(self, **params):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.tool = PythonTool(isolation="namespaces", num_workers=1, max_file_mb=16, memory_mb=256, **params)
        try:
            self.do(self.tool._started())
        except SandboxError as error:
            pytest.skip(f"this machine does not give namespaces: {error}")

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def call(self, program, timeout=30):
        try:
            return self.do(self.tool.execute(program, timeout=timeout))
        except ToolError as error:
            return f"{error.kind}: {error}"

    def close(self):
        self.do(self.tool.close())
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(scope="module")
def single():
    single = Single()
    yield single
    single.close()


@pytest.mark.parametrize("name", LEFT)
def test_the_next_call_sees_nothing_of_the_last(single, name):
    leave, look, reused = LEFT[name]
    soil = "open('soiled', 'w')"  # the next call's sandbox is a new one
    single.call(soil)
    # one of the programs stops itself
    namespaces, left = single.call(NAMESPACES), single.call(leave, timeout=6)
    reused_now = single.call(NAMESPACES) == namespaces
    assert reused is None or reused_now == reused, left
    assert "done" not in left and "sent" not in left and "sandbox" not in left, left
    single.call(soil)
    before = single.call(look)
    single.call(soil)
    single.call(leave, timeout=6)
    assert single.call(look) == before and "Error" not in before


def test_a_sandbox_serves_many_calls_and_is_replaced(single):
    assert len({single.call(NAMESPACES) for _ in range(20)}) == 1
    replaced = [single.call("open('a', 'w')\n" + NAMESPACES) for _ in range(5)]
    assert all(before != after for before, after in itertools.pairwise(replaced))  # the kernel numbers some alike later


def test_a_call_that_was_stopped_is_not_followed_in_its_sandbox(single):
    namespaces = single.call(NAMESPACES)
    assert single.call("while True: pass", timeout=0.5).startswith("timeout")
    assert single.call(NAMESPACES) != namespaces


def test_a_long_call_is_watched_no_longer_than_it_runs(single):
    assert single.call("import time; time.sleep(0.3)") == ""
    assert single.call("x = b'x' * (100 << 20); len(x)") == f"{100 << 20}\n"


def test_a_dead_sandbox_is_replaced(single):
    """As the kernel kills it where the machine runs out of memory."""
    supervisor = psutil.Process(single.tool._pool._process.pid).children()[0]
    for sandbox in supervisor.children():
        sandbox.kill()
    assert single.call("6 * 7").startswith(("42", "crash"))
    assert single.call("6 * 7") == "42\n"


@pytest.mark.parametrize("kept, shared", [("mmap.mmap(-1, 99)", True), ("bytearray(99)", False)])
def test_memory_that_calls_would_share_is_noticed(kept, shared):
    """Writable memory of a preloaded module that a fork does not copy: no sandbox is used again then."""
    program = f"import mmap, sys; sys.path.append({TOOLS!r}); kept = {kept}; import python_sandbox"
    program += "; print(python_sandbox.shares_memory())"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{shared}\n"


AS_ANOTHER_USER = f"""
import runpy
tests = runpy.run_path({__file__!r})
single = tests["Single"]()
for name in tests["LEFT"]:
    tests["test_the_next_call_sees_nothing_of_the_last"](single, name)
single.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1) to become another user")
def test_without_root():
    """A user who is not root owns the /tmp of the sandbox, and calls may change its attributes."""
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    command = [*user, sys.executable, "-W", "ignore", "-B", "-c", AS_ANOTHER_USER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
