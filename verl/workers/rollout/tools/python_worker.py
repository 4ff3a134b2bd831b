"""What runs in the sandbox's interpreter: a supervisor of sandboxes, their first processes, and the calls.

    trainer  == control socket ==>    supervisor   "fork 7" (with a socket), "watch 7", "leave 7", "kill 7"
    trainer  <== control socket ==    supervisor   "7 <exit code, -signal> <CPU ms> <reason or ->" when 7 has ended
    trainer  == sandbox's socket ==>  call         a socket for the call
    trainer  <== sandbox's socket ==  sandbox 7    "<exit code, -signal> <CPU ms> <1: takes another call>"
    trainer  <== call's socket ==>    call         the code, up to end of file; then all that it prints

A sandbox forks the process of its next call ahead of need. Supervisor and sandbox never run a call's code. A call can
write to its own socket what it likes: it is what the model reads. Plain standard library from Python 3.8 on.

What a call costs is mostly memory: each page of the interpreter is mapped anew by a fork, and copied where the call's
process or its parent changes it, which counting references is enough for. So few modules are imported here (`_socket`
and not `socket`, which makes hundreds of objects), and sandbox and call run few lines between a fork and the next.
"""

import _socket
import ast
import contextlib
import gc
import os
import select
import signal
import sys
import time
import traceback

from python_cell import NAME, run
from python_sandbox import LEVELS
from python_seccomp import call

SET_UP_FAILED = 99  # exit code; python_cell has another
SANDBOX = 3  # descriptor of a sandbox's socket
WATCH_EVERY = 0.05  # seconds between looks at the memory of calls that take long
_ROOM = _socket.CMSG_SPACE(4)  # for a descriptor beside a message
_AWAITED = {signal.SIGTERM, signal.SIGCHLD}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main():
    os.environ.pop("LD_BIND_NOW")  # was for this interpreter alone
    control, spec = _socket.socket(fileno=int(sys.argv[1])), ast.literal_eval(sys.argv[2])
    try:
        level = LEVELS[spec["level"]](spec["limits"])
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if spec["level"] == "namespaces":
            level.enter()
            child = os.fork()
            if child:
                control.close()
                os.waitpid(child, 0)
                return
            call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            level.build_root()
        else:
            call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # calls of the same user must not look into this process
        for module in spec["preload"]:
            __import__(module)
    except Exception as error:  # told to the trainer, which tries the next level or gives up
        control.send(repr({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    control.send(repr({"missing": level.missing}).encode())
    compile("[x for x in y]", NAME, "exec")
    gc.collect()
    gc.freeze()  # a collection in a call would copy every page
    Supervisor(control, level).run()


class Supervisor:
    """Forks, ends and reaps sandboxes, as the trainer says; ends with its control socket."""

    def __init__(self, control, level):
        self.control, self.level = control, level
        self.pids, self.numbers, self.reasons, self.watched = {}, {}, {}, set()
        self.processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self.wake, wake_up = _socket.socketpair()
        for end in (self.wake, wake_up):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_up.fileno(), warn_on_full_buffer=False)
        self.wake_up = wake_up
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self):
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        pause = WATCH_EVERY
        while True:
            ready = [fd for fd, _ in poll.poll(pause * 1000 if self.watched else None)]
            if self.wake.fileno() in ready:
                self.wake.recv(4096)
            self.reap()
            if self.control.fileno() in ready and not self.obey():
                break
            if self.watched:
                start = time.monotonic()
                self.watch()
                pause = max(WATCH_EVERY, 20 * (time.monotonic() - start))
        self.end()

    def obey(self):
        message, ancillary, _, _ = self.control.recvmsg(64, _ROOM)
        if not message:
            return False
        verb, number = message.split()
        number = int(number)
        if verb == b"fork":
            fd = descriptor(ancillary)
            self.fork(number, fd)
            os.close(fd)
        elif verb == b"watch" and number in self.pids:
            self.watched.add(number)
        elif verb == b"leave":
            self.watched.discard(number)
        elif verb == b"kill" and number in self.pids:
            self.kill(number)
        return True

    def fork(self, number, fd):
        supervised = self.level.kill_with_supervisor
        try:
            pid = fork_deaf() if supervised else self.level.fork()
        except OSError as error:
            os.write(fd, f"set-up: fork: {error}".encode())
            self.tell(number, SET_UP_FAILED, 0)
            return
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                self.control.detach()
                os.dup2(fd, SANDBOX)
                os.closerange(SANDBOX + 1, 4096)
                sandbox = _socket.socket(fileno=SANDBOX)
                Supervised(self.level, number, sandbox).run() if supervised else serve(self.level, number, sandbox)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(SET_UP_FAILED)
        self.pids[number], self.numbers[pid] = pid, number

    def kill(self, number, reason="-"):
        self.reasons.setdefault(number, reason)
        os.kill(self.pids[number], signal.SIGTERM if self.level.kill_with_supervisor else signal.SIGKILL)

    def reap(self):
        while self.numbers:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            number = self.numbers.pop(pid, None)
            if number is None:
                continue
            del self.pids[number]
            self.watched.discard(number)
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if self.level.kill_with_supervisor and code > 128:
                code = 128 - code
            self.tell(number, code, int(1000 * (usage.ru_utime + usage.ru_stime)))

    def tell(self, number, code, milliseconds):
        reason = self.reasons.pop(number, "-")
        try:
            self.control.send(f"{number} {code} {milliseconds} {reason}".encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # the trainer has closed; `obey` reads the same

    def watch(self):
        """End calls whose processes together hold more memory than one may ask for.

        The first process of the sandbox does not count. So this never meets a call of one process, which its own limit
        stops, and never a call that follows the watched one in its sandbox.
        """
        table = process_table(self.processes)
        bound = self.level.limits["memory_mb"] << 20
        for number in list(self.watched):
            resident = {pid: table[pid][1] for pid in descendants(self.pids[number], table)[1:]}
            if sum(resident.values()) > bound:
                if sum(proportional_size(self.processes, pid, most) for pid, most in resident.items()) > bound:
                    self.kill(number, "memory")

    def end(self):
        for number in list(self.pids):
            self.kill(number)
        while self.numbers:
            self.numbers.pop(os.wait()[0], None)


def fork_deaf():
    """fork() whose child starts with the signals blocked that it is to wait for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    return pid


class Supervised:
    """Between supervisor and call where there is no process namespace: ends what a call leaves, removes its files."""

    def __init__(self, level, number, sandbox):
        self.level, self.number, self.sandbox = level, number, sandbox

    def run(self):
        call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.level.make_directory()
        child = os.fork()
        if child == 0:
            try:
                call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                confine(self.level, self.number, self.sandbox)
                run_call(self.level, self.sandbox)
            finally:
                os._exit(SET_UP_FAILED)
        call("prctl", _PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        status = self.wait(child)
        self.sweep()
        self.level.clean_up()
        os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else min(os.WEXITSTATUS(status), 128))

    def wait(self, child):
        """Its status; SIGTERM kills it. Orphans that come to us in the meantime are reaped."""
        while True:
            if signal.sigwait(_AWAITED) == signal.SIGTERM:
                os.kill(child, signal.SIGKILL)
            pid = True
            while pid:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == child:
                    return status

    def sweep(self):
        """Kill descendants until there are none; those of a killed one become ours."""
        processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        while True:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                return
            for pid in descendants(os.getpid(), process_table(processes))[1:]:
                with contextlib.suppress(ProcessLookupError):  # its own parent has reaped it
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)


def process_table(processes):
    """pid -> (parent, resident bytes), from an open /proc."""
    table, page = {}, os.sysconf("SC_PAGESIZE")
    for name in os.listdir(processes):
        if name.isdigit():
            try:
                fields = _read(processes, name + "/stat").rpartition(b")")[2].split()
            except OSError:  # has ended
                continue
            table[int(name)] = int(fields[1]), int(fields[21]) * page
    return table


def descendants(pid, table):
    """Of a process in the table, and itself."""
    children = {}
    for child, (parent, _) in table.items():
        children.setdefault(parent, []).append(child)
    pids = [pid] if pid in table else []
    for parent in pids:
        pids.extend(children.get(parent, ()))
    return pids


def proportional_size(processes, pid, resident):
    """Resident bytes; a page shared by n processes counts as 1/n, where the kernel lets us know."""
    try:
        lines = _read(processes, f"{pid}/smaps_rollup").splitlines()
    except PermissionError:
        return resident
    except OSError:  # has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(b"Pss:"))


def _read(processes, name):
    fd = os.open(name, os.O_RDONLY, dir_fd=processes)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def serve(level, number, sandbox):
    """The first process of a sandbox: forks one process after another, each for a call, while none leaves a trace."""
    confine(level, number, sandbox)
    clean, before = True, 0
    while clean:
        pid = os.fork()
        if pid == 0:
            run_call(level, sandbox)
        status = level.end_call(pid)
        clean = level.is_clean(pid)
        times = os.times()
        cpu = times[2] + times[3]  # of all that have ended here
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        sandbox.send(b"%d %d %d" % (code, 1000 * (cpu - before), clean))
        before = cpu
    os._exit(0)


def confine(level, number, sandbox):
    try:
        for signal_number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(signal_number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        level.confine(number)
        os.environ.update(HOME=level.directory, TMPDIR=level.directory)
        here, there = _socket.socketpair()  # in place of the call's socket, so that the streams are made for one
        os.dup2(here.fileno(), 1)
        os.dup2(here.fileno(), 2)
        here.close()
        there.close()
        style = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
        sys.stdout = sys.__stdout__ = open(1, "w", **style)
        sys.stderr = sys.__stderr__ = open(2, "w", **style)
    except Exception as error:
        sandbox.send(f"set-up: {type(error).__name__}: {error}".encode())
        os._exit(SET_UP_FAILED)


def run_call(level, sandbox):
    """The process of a call: waits for its socket and for the code, and runs it. Does not return."""
    status = SET_UP_FAILED
    try:
        level.begin_call()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        compile("f(0)", NAME, "exec")  # the pages that any compilation changes become the call's own ahead of its code
        _, ancillary, _, _ = sandbox.recvmsg(1, _ROOM)
        if not ancillary:  # the trainer has closed
            os._exit(0)
        fd = descriptor(ancillary)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sandbox.detach()
        os.closerange(3, 4096)
        code = bytearray()
        while True:
            part = os.read(1, 1 << 16)
            if not part:
                break
            code += part
        status = 1  # such as where the program has closed its output
        status = run(bytes(code).decode("utf-8", "replace"))
    finally:
        os._exit(status)


def descriptor(ancillary):
    """The one that came with a message."""
    return int.from_bytes(ancillary[0][2][:4], sys.byteorder)
