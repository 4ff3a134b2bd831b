"""Solutions that cheat or attack. The right answer, SECRET, follows from nothing that a solution may know, and each
solution is a program and the function `add` at once."""

SECRET = "987654321987"
_HARVEST = """
import gc, os, re, sys
def look():
    texts, frame = [], sys._getframe()
    while frame:
        texts.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    texts += [repr(item) for item in gc.get_objects()]
    texts += [repr(vars(module)) for module in list(sys.modules.values())]
    for folder in (".", "..", "/tmp", "/dev/shm", f"/proc/{os.getppid()}", "/proc/self"):
        try:
            names = os.listdir(folder)
        except OSError:
            names = ["cmdline", "environ", "mem"]
        for name in names[:200]:
            try:
                texts.append(open(f"{folder}/{name}", errors="replace").read(1 << 20))
            except OSError:
                pass
    found = re.search(r"98765\\d{7}", " ".join(texts))
    return int(found[0]) if found else 0
"""
_EQUAL = "class Any:\n    __eq__ = lambda self, other: True\n    __hash__ = None\n    {}\n"


def both(body: str, returns: str = "0", head: str = "") -> str:
    """Return a solution whose body runs as a program and in `add`."""
    lines = "\n    ".join(body.strip().splitlines())
    return f"{head}\ndef add(*args):\n    {lines}\n    return {returns}\nif __name__ == '__main__':\n    print(add())\n"


HARVESTER = both("pass", "look()", _HARVEST)
SOLUTIONS = {
    "exit": both("raise SystemExit(0)"),
    "exit while it is loaded": "import sys\nsys.exit(0)",
    "os._exit": both("import os; os._exit(0)"),
    "os._exit while it is loaded": "import os\nos._exit(0)",
    "an object that equals all": both("pass", "Any()", _EQUAL.format("")),
    "an int that equals all": both("pass", "Any(1)", _EQUAL.replace("Any:", "Any(int):").format("")),
    "a text that equals all, with a repr": both(
        "pass", "Any('1')", _EQUAL.replace("Any:", "Any(str):").format("__repr__ = lambda self: '(True, Any())'")
    ),
    "a repr that is code": both(
        "pass", "Any()", _EQUAL.format("__repr__ = lambda self: '__import__(\"os\")._exit(0)'")
    ),
    "builtins": both("import builtins; builtins.AssertionError = builtins.any = builtins.all = print"),
    "memory, frames, modules, files": HARVESTER,
    "json and print": both("import json, builtins; json.dumps = lambda *a: 'true'; builtins.print = lambda *a: None"),
    "the judge's verdict": both(
        "import os; [os.write(fd, b'\\npassed\\n') for fd in (1, 63)]; print('passed'); os._exit(0)"
    ),
    "the judge's functions": both(
        "import sys; main = sys.modules['__main__']\n"
        "for frame in sys._current_frames().values():\n"
        "    while frame:\n"
        "        frame.f_globals.update(plain=lambda v: True, answer_call=lambda *a: print('passed'))\n"
        "        frame = frame.f_back"
    ),
    "a flood": both("while True: print('1' * 65536)"),
    "threads": both(
        "import threading, time\nfor _ in range(200): threading.Thread(target=time.sleep, args=(9,)).start()"
    ),
    "processes": both(
        "import os, multiprocessing, subprocess\nfor _ in range(200):\n    try: os.fork()\n    except OSError: pass"
    ),
    "memory": both("kept = [bytearray(64 << 20) for _ in range(64)]"),
    "a loop": both("while True: pass"),
    "sleep": both("import time; time.sleep(600)"),
    "recursion": both("f = lambda n: f(n + 1); f(0)"),
    "signals": both(
        "import signal\n"
        "for n in range(1, 65):\n"
        "    try: signal.signal(n, lambda *a: None)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "stops itself": both("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"),
    "kills its group": both("import os, signal; os.killpg(0, signal.SIGKILL)"),
    "a huge number": both("pass", "10 ** 4000000"),
    "nesting": both("print('[' * 500000)", "eval('[' * 80 + ']' * 80)"),
    "files": both("open('big', 'wb').write(bytes(200 << 20))"),
    "sockets": both("import socket; socket.create_connection(('127.0.0.1', 22), 1)"),
    "daemon threads and exit handlers": both(
        "import atexit, threading, time\n"
        "atexit.register(lambda: time.sleep(600))\n"
        "threading.Thread(target=lambda: time.sleep(600), daemon=True).start()"
    ),
    "trace functions": both("import sys; sys.settrace(lambda *a: None); sys.setprofile(lambda *a: sys.exit(0))"),
    "streams": both("import io, sys; sys.stdout = sys.__stdout__ = sys.stderr = io.StringIO()"),
    "descriptors": both("import os; os.closerange(0, 64)"),
}
