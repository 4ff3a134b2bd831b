"""The server in the sandbox's interpreter: it makes the imports, forks a confined process per program, and watches it.

    trainer  == control socket ==>  server    two sockets per process to fork: one for its program, one for its end
    trainer  == end socket ==>      server    "run" with a program; when closed, the process is killed
    trainer  <== end socket ==      server    (exit code or -signal, "disk", "threads" or "cpu" where it was killed)
    trainer  <== end socket ==      process   "why", a string, if it could not be confined
    trainer  <=> program socket ==> process   the program's size, the program; then its output

A process is forked and confined before it is needed. Before the program starts, it closes all but the program's socket,
so no program can pose as the server. Few modules are imported here, because changed memory pages slow down a fork.

A session's process runs many programs, its cells, in one namespace and one folder. It stops itself by SIGSTOP at a
cell's end, and only this server lets it go on, at the next "run": so nothing of it runs between cells, and it has no
message to forge. The server believes nothing that the process does except its end and its stop.

    trainer  <== end socket ==      server    (None, None) where a cell has ended and the process is stopped; the reason
                                              "lost" where the process was killed between cells
    trainer  <=> program socket ==> process   the size of a cell, the cell; its output up to the stop
"""

import _signal
import _socket
import ast
import builtins
import contextlib
import gc
import os
import resource
import select
import signal
import stat
import sys
import time
import types

# The code that runs between cells must not change when a cell changes the module os.
from os import chdir, dup2, getcwd, getpid, kill, set_blocking, umask
from os import read as read_descriptor

from cell import NAME, run
from confinement import MAX_DESCRIPTORS, MAX_THREADS, NOT_ALLOWED, Confinement, call, status_of

OWN_MODULES = "cell", "confinement", "server"
SOCKET = MAX_DESCRIPTORS - 1  # the program socket's descriptor beside 1 and 2, which a cell may redirect
WATCH_EVERY, FILE_BYTES, SIGKILL = 0.05, 4096, 9  # seconds; bytes counted for an empty file; signal
SERVER_DESCRIPTORS = 4096
FIRST_UID, UIDS = 61184, 4000  # user ids of programs without Landlock; no account has them
# Audit events of Python that raise at once what the kernel would refuse; `os.system` would not report a refusal.
REFUSED = {"os.fork", "os.forkpty", "os.system", "os.posix_spawn", "os.exec", "subprocess.Popen", "pty.spawn"}
REFUSED |= {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "os.mkdir"}


class Server:
    """Forks, watches, ends and reaps the programs' processes, each with its own folder within `folder`. With `session`,
    a `Setting`, a process runs the cells of a session."""

    def __init__(self, control, confinement, folder, session=None):
        self.control, self.confinement, self.folder, self.count = control, confinement, folder, 0
        self.programs, self.ends, self.poll = {}, {}, select.poll()  # keys: descriptors of processes, end sockets
        self.poll.register(control, select.POLLIN)
        self.session, self.stops = session, None  # a descriptor that is readable after a process has stopped
        if session:
            self.stops, wakeup = os.pipe2(os.O_NONBLOCK)
            self.poll.register(self.stops, select.POLLIN)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def run(self):
        """Serve until the trainer closes the control socket."""
        watch_at = 0.0
        while True:
            some_run = any(program.runs for program in self.programs.values())
            # The control socket comes first, so no descriptor that is closed in this round is reused in it.
            for fd, _ in self.poll.poll(1000 * WATCH_EVERY if some_run else None):
                if fd in self.programs:
                    self.reap(fd)
                elif fd in self.ends:
                    self.hear(fd)
                elif fd == self.stops:
                    os.read(fd, 4096)
                    for program in self.programs.values():
                        self.end_cell_if_stopped(program)
                elif fd == self.control.fileno() and not self.fork():
                    return
            if some_run and time.monotonic() >= watch_at:
                for program in self.programs.values():
                    if program.runs and program.reason is None:
                        with contextlib.suppress(OSError, StopIteration):  # the process has ended meanwhile
                            self.watch(program)
                watch_at = time.monotonic() + WATCH_EVERY

    def hear(self, fd):
        """Let a program run, or kill its process if the trainer has closed its end socket."""
        program = self.ends[fd]
        try:
            program.runs = bool(program.end.recv(16))
        except ConnectionResetError:  # the trainer closed it without reading a reply
            program.runs = False
        if not program.runs:
            self.poll.unregister(fd)
            os.kill(program.pid, SIGKILL)
        elif self.session:
            if program.cells:  # the first cell needs no start, and may have ended before this "run" was read
                if os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    program.runs = False  # the process was killed between cells
                    return
                program.cpu_before = cpu_seconds_of(program.pid)
                os.kill(program.pid, signal.SIGCONT)
            program.cells += 1
            self.end_cell_if_stopped(program)

    def end_cell_if_stopped(self, program):
        """Tell the trainer that a cell has ended, unless its files or threads are too many now."""
        try:
            if not program.runs or not os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOHANG):
                return
        except ChildProcessError:  # the process has ended, and is reaped next
            return
        program.runs = False
        with contextlib.suppress(OSError, StopIteration):  # the process has ended meanwhile
            self.watch(program)
        if program.reason is None:
            with contextlib.suppress(OSError):  # the trainer has closed
                program.end.send(repr((None, None)).encode())

    def fork(self):
        """Fork a process for the trainer's request; return False if the trainer has closed the socket."""
        _, ancillary, _, _ = self.control.recvmsg(1, _socket.CMSG_SPACE(8))
        if not ancillary:
            return False
        sock, end = (int.from_bytes(ancillary[0][2][i : i + 4], sys.byteorder) for i in (0, 4))
        self.count += 1
        # Landlock does not hide a path's status, so the folder's name is random: no program can guess another's.
        program = types.SimpleNamespace(folder=f"{self.folder}/{os.urandom(16).hex()}", reason=None, runs=False, pid=0)
        program.cells, program.cpu_before = 0, 0.0
        program.end = _socket.socket(fileno=end)
        try:
            os.mkdir(program.folder, 0o700)
            if not self.confinement.landlock:
                os.chown(program.folder, FIRST_UID + self.count % UIDS, -1)
            program.pid = os.fork()
            if program.pid == 0:
                try:
                    self.become(program, sock)
                finally:
                    os._exit(1)
            process = os.pidfd_open(program.pid)
            self.programs[process] = self.ends[end] = program
            for fd in (process, end):
                self.poll.register(fd, select.POLLIN)
        except OSError as error:
            if program.pid:
                os.kill(program.pid, SIGKILL)
                os.waitpid(program.pid, 0)
            program.end.send(repr(str(error)).encode())
        os.close(sock)
        return True

    def become(self, program, sock):
        """Confine this process, a fork, wait for the program and run it. It does not return."""
        try:
            if self.session:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # not the server's: all would share its flags and locks
            os.chdir(program.folder)
            self.confinement.apply(program.folder)
        except Exception as error:
            program.end.send(repr(f"{type(error).__name__}: {error}").encode())
            raise
        os.dup2(sock, 1)
        os.dup2(sock, 2)
        os.closerange(3, SERVER_DESCRIPTORS)
        # Copies, before the program comes, the memory pages that every compilation changes.
        compile("f(0)", NAME, "exec")
        if self.session:
            sys.addaudithook(refuse)
            run_cells(NOT_ALLOWED, self.session)
            os._exit(1)
        code = read(int.from_bytes(read(8, 1), "little"), 1)
        sys.addaudithook(refuse)
        run(code.decode("utf-8", "replace"), NOT_ALLOWED)
        call("fflush", None)  # writes the output of C libraries
        os._exit(0)

    def watch(self, program):
        """Count a program's threads and the size of its files once, and kill it if either is too large: no resource
        limit covers these sums. Removed files count while they are open; one that is mapped, whose size is hidden, is
        too large."""
        total, limit, process = 0, self.confinement.file_bytes, f"/proc/{program.pid}"
        for where in (program.folder, f"{process}/fd")[: 2 if self.confinement.landlock else 1]:
            for name in os.listdir(where):
                with contextlib.suppress(OSError):  # the file has been removed or closed meanwhile
                    status = os.stat(f"{where}/{name}", follow_symlinks=where != program.folder)
                    if where == program.folder or stat.S_ISREG(status.st_mode) and not status.st_nlink:
                        total += FILE_BYTES + 512 * status.st_blocks
        if self.confinement.landlock:
            with open(f"{process}/maps", errors="replace") as maps:
                mapped = any(program.folder in line and line.endswith("(deleted)\n") for line in maps)
                total += limit + 1 if mapped else 0
        threads, main_has_ended = int(status_of(program.pid, "Threads")), status_of(program.pid, "State")[0] == "Z"
        if self.session and cpu_seconds_of(program.pid) - program.cpu_before > self.confinement.cpu_seconds:
            program.reason = "cpu"
        elif total > limit:
            program.reason = "disk"
        elif threads > MAX_THREADS or threads > 1 and main_has_ended:  # then /proc hides the other threads' open files
            program.reason = "threads"
        if program.reason:
            os.kill(program.pid, SIGKILL)

    def reap(self, process):
        """Remove the files of an ended process, and send the trainer its exit code and reason."""
        program = self.programs.pop(process)
        _, status, usage = os.wait4(program.pid, 0)
        for name in os.listdir(program.folder):
            os.unlink(f"{program.folder}/{name}")
        os.rmdir(program.folder)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if program.reason == "threads" and code != -SIGKILL:  # seen at its exit: threads outlive the main one a moment
            program.reason = None
        used = 0.0 if self.session else usage.ru_utime + usage.ru_stime  # the kernel limits no session's CPU time
        if code == -SIGKILL and used > 0.9 * self.confinement.cpu_seconds:
            program.reason = program.reason or "cpu"
        if program.cells and not program.runs:
            program.reason = program.reason or "lost"  # no cell is at fault; the machine may be out of memory
        with contextlib.suppress(OSError):  # an unread "run" would reset the socket when it is closed
            program.end.recv(16, _socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):  # the trainer has closed
            program.end.send(repr((code, program.reason)).encode())
        del self.ends[program.end.fileno()]
        for fd in (process, program.end.fileno()):
            with contextlib.suppress(KeyError):  # the trainer has closed
                self.poll.unregister(fd)
            os.close(fd)
        program.end.detach()


def cpu_seconds_of(pid):
    """Return the CPU seconds that a process has used, with all its threads (clock_getcpuclockid of Linux)."""
    return time.clock_gettime(~pid << 3 | 2)


def refuse(event, _):
    """Raise PermissionError for refused events (a program's audit hook); the kernel enforces the rules in any case."""
    if event in REFUSED:
        raise PermissionError(NOT_ALLOWED)


def seed():
    """Seed `random`, and numpy if it is imported, so that a session's cells draw the same numbers when run again."""
    import random  # only here: it would slow down every fork of a server without sessions

    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def run_cells(not_allowed, setting):
    """Run cells until this process's socket is closed. After each, the process stops until the server lets it go on."""
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
    """The things with which each cell begins, beside names, modules, files and threads: signal handlers, timers, trace
    functions, builtins, streams, the working folder, descriptors. That helps careless programs; a hostile one can undo
    it, and harms its own session only. One is made before the fork, as that reads many memory pages."""

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


def main():
    """Run the server; argv: the control socket's descriptor, and the repr of `Interpreter.spec` with `folder`."""
    os.environ.update(dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR"), "."))  # the program's own folder
    control, spec = _socket.socket(fileno=int(sys.argv[1])), ast.literal_eval(sys.argv[2])
    os.umask(0o077)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # out of memory, a program is killed before the trainer
            file.write("1000")
        for module in spec["preload"]:
            with contextlib.suppress(ImportError if spec["optional"] else ()):
                __import__(module)
        if spec["session"]:
            seed()  # here it makes the imports only: each session is seeded anew
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a session keeps two descriptors
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, SERVER_DESCRIPTORS)), hard))
        limits = spec["memory_mb"], spec["cpu_seconds"], spec["max_file_mb"]
        confinement = Confinement(*limits, limits_cpu=not spec["session"])
    except Exception as error:
        control.send(repr(f"{type(error).__name__}: {error}").encode())
        return
    os.chmod(spec["folder"], 0o711)  # programs with their own user ids must reach their folders
    errors, (here, _) = os.dup(2), _socket.socketpair()
    for fd, name in ((1, "stdout"), (2, "stderr")):  # streams made for sockets, which a program's socket then replaces
        os.dup2(here.fileno(), fd)
        stream = open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.dup2(errors, 2)
    control.send(repr(confinement.landlock).encode())
    setting = Setting() if spec["session"] else None
    gc.collect()
    gc.freeze()  # otherwise a collection in a program would copy every memory page
    server = Server(control, confinement, spec["folder"], setting)
    try:
        server.run()
    finally:
        for process in list(server.programs):
            server.programs[process].end.shutdown(_socket.SHUT_RDWR)  # no end is sent: the program is not at fault
            os.kill(server.programs[process].pid, SIGKILL)
            server.reap(process)
        os.rmdir(spec["folder"])
