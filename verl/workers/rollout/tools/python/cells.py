"""Runs the cells of a session one after the other, in the session's process: in one namespace and one folder.

After each cell it undoes what would reach later cells by other ways than names, modules, files and threads: signal
handlers, timers, trace functions, replaced builtins and streams, the working folder, redirected descriptors. That helps
programs that are careless. One that is hostile can undo it, and harms its own session only: the server believes nothing
that this process does except its end and its stop.
"""

import _signal
import builtins
import gc
import sys
import types
from os import chdir, dup2, getcwd, getpid, kill, set_blocking, umask
from os import read as read_descriptor

from cell import run
from confinement import MAX_DESCRIPTORS, call

SOCKET = MAX_DESCRIPTORS - 1  # the program socket's descriptor beside 1 and 2, which a cell may redirect
OWN_MODULES = "cell", "cells", "confinement", "server"


def seed():
    """Seed `random`, and numpy if it is imported, so that a session's cells draw the same numbers when run again."""
    import random  # not above: it would slow down every fork of a server without sessions

    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def run_cells(not_allowed, setting):
    """Run cells until the socket of this process is closed. After each, the process stops until the server goes on."""
    dup2(1, SOCKET)
    module, setting.folder, number = types.ModuleType("__main__"), getcwd(), 0
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    seed()
    while size := read(8):
        number += 1
        code = read(int.from_bytes(size, "little"))
        run(code.decode("utf-8", "replace"), not_allowed, module, f"<python {number}>")
        call("fflush", None)  # writes the output of C libraries
        vars(module).pop("__builtins__", None)
        setting.restore()
        kill(getpid(), _signal.SIGSTOP)


def read(size, fd=SOCKET):
    """Return the next bytes of a socket, fewer than `size` only at its end."""
    data = bytearray()
    while len(data) < size and (part := read_descriptor(fd, size - len(data))):
        data += part
    return bytes(data)


class Setting:
    """The things with which each cell begins, beside names, modules, files and threads.

    One is made before the fork, for all sessions, as that reads many memory pages.
    """

    def __init__(self):
        self.folder, self.builtins = "", dict(vars(builtins))
        self.sys = {name: getattr(sys, name) for name in ("displayhook", "excepthook", "unraisablehook", "stdin")}
        self.streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self.handlers = {number: _signal.getsignal(number) for number in _signal.valid_signals()}

    def restore(self):
        sys.settrace(None)
        sys.setprofile(None)
        for timer in (_signal.ITIMER_REAL, _signal.ITIMER_VIRTUAL, _signal.ITIMER_PROF):
            _signal.setitimer(timer, 0)
        for number, handler in self.handlers.items():
            if handler is not None and _signal.getsignal(number) is not handler:
                _signal.signal(number, handler)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        vars(builtins).update(self.builtins)
        sys.modules.update(builtins=builtins, sys=sys)
        gc.callbacks.clear()
        gc.enable()
        chdir(self.folder)
        umask(0o077)
        for fd, name in ((1, "stdout"), (2, "stderr")):
            dup2(SOCKET, fd)
            set_blocking(fd, True)
            try:
                self.streams[name].flush()
            except ValueError:  # closed or detached
                stream = open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
                self.streams[name] = stream
            setattr(sys, name, self.streams[name])
            setattr(sys, f"__{name}__", self.streams[name])
        vars(sys).update(self.sys)
