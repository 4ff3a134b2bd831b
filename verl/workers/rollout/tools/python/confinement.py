"""Confines a process for good before it reads a program: resource limits, Landlock (files), seccomp (system calls).

It needs no namespaces, mounts or user id of its own: it works as root in a default container and as an ordinary user.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

NOT_ALLOWED = "A program here starts no processes, has no network, and keeps files, not folders, in its working folder."
MAX_THREADS, MAX_DESCRIPTORS = 64, 64

# System calls that are allowed with any arguments: name, number on x86_64, number on aarch64 (-1: it has none).
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, close 3 57, lseek 8 62, dup 32 23,
dup2 33 -1, dup3 292 24, fstat 5 80, stat 4 -1, lstat 6 -1, newfstatat 262 79, statx 332 291, access 21 -1,
faccessat 269 48, faccessat2 439 439, readlink 89 -1, readlinkat 267 78, getdents64 217 61, getcwd 79 17,
chdir 80 49, fchdir 81 50, unlink 87 -1, unlinkat 263 35, rename 82 -1, renameat 264 38, renameat2 316 276,
umask 95 166, flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, listxattr 194 11, pipe 22 -1, pipe2 293 59,
poll 7 -1, ppoll 271 73, select 23 -1, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -1,
epoll_pwait 281 22, eventfd2 290 19, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214, madvise 28 233, msync 26 227, futex 202 98,
set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, arch_prctl 158 -1, sched_yield 24 124,
sched_getaffinity 204 123, exit 60 93, exit_group 231 94, wait4 61 260, restart_syscall 219 128, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -1, alarm 37 -1,
getitimer 36 102, setitimer 38 103, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
clock_getres 229 114, gettimeofday 96 169, time 201 -1, times 100 153, getrusage 98 165, getrlimit 97 163,
uname 63 160, sysinfo 99 179, getrandom 318 278, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158"""
# These return 0 and do nothing: Landlock does not cover them, and `shutil.copy2` needs them to succeed.
_WITHOUT_EFFECT = """
chmod 90 -1, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -1, fchown 93 55, lchown 94 -1, fchownat 260 54,
utime 132 -1, utimes 235 -1, futimesat 261 -1, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7"""
# Threads must share memory, file system, descriptors and handlers, or /proc/PID/fd would not show their open files.
_PID, _ALL, _THREAD, _NEW_NAMESPACES = 0xFEEDFACE, 0xFFFFFFFF, 0x10F00, 0x7E020000
_LIMITS = tuple(which for which in range(16) if which != resource.RLIMIT_CORE)  # a program may lower these
_TMPFILE, _TRUNC = 1 << 22, 1 << 9
# These are allowed if, for each (argument, mask, values), argument & mask is in values; _PID is the process.
_CHECKED = {
    "clone 56 220": [(0, _THREAD | _NEW_NAMESPACES, (_THREAD,))],
    "close_range 436 436": [(2, _ALL, (0,))],
    "sendto 44 206": [(3, 1, (0,))],  # no urgent data, here and below, as it has been used to attack the kernel
    "recvfrom 45 207": [(3, 1, (0,))],
    "recvmsg 47 212": [(2, 1, (0,))],
    "setrlimit 160 164": [(0, _ALL, _LIMITS)],
    # No file without a name, and no truncation through a descriptor for reading, which old Landlocks do not check.
    "openat 257 56": [(2, _TMPFILE | _TRUNC | os.O_ACCMODE, (0, 1, 2, _TRUNC | 1, _TRUNC | 2))],
    "socketpair 53 199": [(0, _ALL, (1,)), (1, 0xF, (1,))],  # AF_UNIX, SOCK_STREAM: asyncio needs one
    "kill 62 129": [(0, _ALL, (_PID,))],
    "tgkill 234 131": [(0, _ALL, (_PID,))],
    "prlimit64 302 261": [(0, _ALL, (0,)), (1, _ALL, _LIMITS)],
    "sched_setaffinity 203 122": [(0, _ALL, (0,))],
    "prctl 157 167": [(0, _ALL, (15, 16))],  # PR_SET_NAME, PR_GET_NAME
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl 16 29": [(1, _ALL, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],
    # Duplicates, flags and locks are allowed, but neither an owner, who would get signals, nor the size of a pipe.
    "fcntl 72 25": [(1, _ALL, (*range(8), 36, 37, 38, 1030))],
}
_FIRST_NEW = 435  # clone3 and all newer calls fail with ENOSYS, so that libc uses an older call
_ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
_LOAD, _AND, _EQUAL, _AT_LEAST, _JUMP, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x05, 0x06
_ALLOW, _KILL, _ERRNO, _NUMBER, _ARCH, _ARGUMENTS = 0x7FFF0000, 0x80000000, 0x00050000, 0, 4, 16

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ, _FILE = 1 << 2 | 1 << 3, 1 << 1 | 1 << 2 | 1 << 14  # rights to read files and folders; all rights of a file
_WRITE = _READ | _FILE | 1 << 5 | 1 << 8  # these rights, and those to make and remove files
_HANDLED = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}  # rights by Landlock's version; 0xFFFF from version 5 on
_SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
_SYSTEM += ["/etc/localtime", "/etc/fonts", "/dev/zero", "/dev/random", "/dev/urandom"]

_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
_CHANGE_USER = 1 << 0 | 1 << 6 | 1 << 7  # CAP_CHOWN, CAP_SETGID, CAP_SETUID
_libc = ctypes.CDLL(None, use_errno=True)
_FUNCTIONS = {name: getattr(_libc, name) for name in ("capset", "fflush", "prctl", "syscall")}


class Confinement:
    """The limits, rules and filter of a process, prepared in its parent, so that little is left to do after the fork.

    Without `limits_cpu`, its parent limits the CPU time: the kernel counts that of a whole process, not of a cell.
    Raises OSError on an unknown processor, or if the kernel lacks Landlock and this process may not change its user.
    """

    def __init__(self, memory_mb, cpu_seconds, max_file_mb, limits_cpu=True):
        if os.uname().machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
            raise OSError(f"no filter of system calls for the processor {os.uname().machine}")
        self.parent, self.cpu_seconds, self.file_bytes = os.getpid(), cpu_seconds, max_file_mb << 20
        self.landlock = max(0, _libc.syscall(_CREATE_RULESET, None, 0, 1))  # Landlock's version, 0 without Landlock
        if not self.landlock and (os.geteuid() or int(status_of("self", "CapEff"), 16) & _CHANGE_USER != _CHANGE_USER):
            raise OSError(
                "no Landlock in this kernel and no right to change the user: set sandbox_fusion_url to a server"
            )
        memory = int(status_of("self", "VmSize").split()[0]) * 1024 + (memory_mb << 20)
        limits = {"AS": memory, "FSIZE": self.file_bytes, "NOFILE": MAX_DESCRIPTORS, "NICE": 0}
        limits.update(MEMLOCK=64 << 10, MSGQUEUE=0, SIGPENDING=64, RTPRIO=0, CORE=1)  # CORE=0 would allow a pipe
        limits.update({"CPU": cpu_seconds} if limits_cpu else {})
        limits = {getattr(resource, "RLIMIT_" + name): value for name, value in limits.items()}
        # A lower limit that is already set stays; infinity is -1.
        self._limits = {which: min(value, resource.getrlimit(which)[1] % 2**64) for which, value in limits.items()}
        folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *_SYSTEM} - {"/"}
        paths = set(map(os.path.realpath, filter(os.path.exists, folders)))
        self._rules = [_rule(path, _READ) for path in paths] + [_rule("/dev/null", _WRITE)]
        lines = seccomp_filter([] if self.landlock else ["unlink", "unlinkat", "rename", "renameat", "renameat2"])
        self._filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
        self._program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(self._filter))
        self._pids = [8 * i + 4 for i, line in enumerate(lines) if line[3] == _PID]

    def apply(self, folder):
        """Confine this process, a fork of the one that made this object.

        With Landlock it can write files only in `folder`; otherwise it becomes the folder's owner. Descriptors stay
        open, so close them next.
        """
        if not self.landlock:
            uid = os.stat(folder).st_uid
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.parent:  # the parent ended before the signal was set
            os._exit(1)
        call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        if self.landlock:
            handled = _HANDLED.get(self.landlock, 0xFFFF)
            ruleset = call("syscall", _CREATE_RULESET, struct.pack("Q", handled), 8, 0)
            for fd, access in [*self._rules, _rule(folder, _WRITE)]:
                call("syscall", _ADD_RULE, ruleset, 1, struct.pack("=Qi", access & handled, fd), 0)
            call("syscall", _RESTRICT_SELF, ruleset, 0)
        for which, value in self._limits.items():  # only now, as descriptors of the parent may be more than are allowed
            resource.setrlimit(which, (value, value))
        for offset in self._pids:
            struct.pack_into("I", self._filter, offset, os.getpid())
        call("prctl", _SET_SECCOMP, 2, self._program, 0, 0)


def call(name, *args):
    """Call a function of libc. Raises OSError where it returns -1."""
    result = _FUNCTIONS[name](*(ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{args[:1]}: {os.strerror(code)}")
    return result


def status_of(pid, field):
    """Return the text of a field, such as Threads, in /proc/PID/status."""
    with open(f"/proc/{pid}/status", errors="replace") as lines:
        return next(line.split(":")[1].strip() for line in lines if line.startswith(field + ":"))


def _rule(path, access):
    """Return a descriptor of the path, and those of the rights that apply to a folder or a file."""
    return os.open(path, os.O_PATH), access if os.path.isdir(path) else access & _FILE


def numbers(table, column):
    """Return a dict from the name of each system call in a table to its number on a processor.

    A `table` is a text like `_ALLOWED`. Its column 1 has the numbers for x86_64, and column 2 those for aarch64; -1
    stands for a call that the processor lacks, which is left out.
    """
    return {row[0]: int(row[column]) for row in map(str.split, table.split(",")) if row[column] != "-1"}


def seccomp_filter(without):
    """Return the lines of a BPF program that refuses system calls not allowed by the tables, or named in `without`."""
    column, architecture = _ARCHITECTURES[os.uname().machine]
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    answers = {number: [allow] for name, number in numbers(_ALLOWED, column).items() if name not in without}
    answers.update(dict.fromkeys(numbers(_WITHOUT_EFFECT, column).values(), [(_RETURN, 0, 0, _ERRNO)]))
    for name, conditions in _CHECKED.items():
        block = []
        for argument, mask, values in conditions:
            block += [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]
            block += [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)] + [refuse]
        (number,) = numbers(name, column).values()
        answers[number] = [*block, allow]
    steps = []  # (first number, lines of BPF for the calls from it on)
    for number in range(max(answers) + 2):
        answer = answers.get(number, [refuse] if number < _FIRST_NEW else [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)])
        if not steps or steps[-1][1] != answer:
            steps.append((number, answer))
    start = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    return start + _search(steps)


def _search(steps):
    """Return the lines of a binary search among the steps: the kernel runs a new filter once for every call number."""
    if len(steps) == 1:
        return steps[0][1]
    middle = len(steps) // 2
    below, from_there = _search(steps[:middle]), _search(steps[middle:])
    return [(_AT_LEAST, 0, 1, steps[middle][0]), (_JUMP, 0, 0, len(below)), *below, *from_there]
