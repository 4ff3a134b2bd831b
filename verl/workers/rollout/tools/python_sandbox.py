"""How a process of the python tool is confined. Plain standard library from Python 3.8 on.

    namespaces   own processes, mounts, network, IPC and host name. The root is read-only and holds the interpreter,
                 /usr, a few devices; /tmp is a small file system in memory. A call's namespaces serve the next call
                 where the call has started no process or thread and made no file (`is_clean`); else they end with it.
    process      where the machine gives no namespaces: the host's own root, a directory for each call; another user
                 (if we are root), Landlock (if the kernel has it).

Both: no capabilities, no new privileges, a seccomp filter (no sockets, no mounts, no tracing, ...), resource limits.
"""

import fcntl
import os
import resource
import signal
import struct
import sys

from python_seccomp import (
    apply_landlock,
    apply_seccomp,
    call,
    landlock_version,
    no_new_privileges,
    prctl,
    seccomp_filter,
    system_call,
)

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = 442, -100, 0x8000, 2
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 4, 8
_CAP_DAC_READ_SEARCH = 2
_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS
_SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"]
_SYSTEM += ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/fonts"]
_DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
_FIRST_UID, _UIDS = 61184, 4000  # no account has them; each call its own


def interpreter_trees():
    """What has to be readable: the system's libraries, this interpreter and its packages."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    prefixes.update(map(os.path.realpath, set(prefixes)))
    prefixes.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    trees = [path for path in _SYSTEM if os.path.lexists(path)]
    for path in sorted(prefixes - {"/"}):
        if not any(path == tree or path.startswith(tree + "/") for tree in trees):
            trees.append(path)
    return trees


def mount(source, target, kind, flags, options=None):
    source, target, kind, options = (x.encode() if x else None for x in (source, target, kind, options))
    call("mount", source, target, kind, flags, options)


class Namespaces:
    """The strong level. `enter` in the process to be confined; `confine` in the first process of a sandbox's own
    process namespace, which never runs a call's code: it forks a process for each call (`begin_call`) and looks at what
    the call leaves (`end_call`, `is_clean`)."""

    kill_with_supervisor = False

    def __init__(self, limits):
        self.limits, self.trees = limits, interpreter_trees()
        inside_tmp = any(tree.startswith("/tmp/") for tree in self.trees)
        self.directory = "/workdir" if inside_tmp else "/tmp"
        self.filter = seccomp_filter()
        self.as_root = os.geteuid() == 0
        self.missing = [] if self.filter else ["seccomp (unknown processor)"]

    def enter(self):
        """New namespaces; the next process forked is the first of the process namespace and calls `build_root`."""
        if not self.as_root:
            uid, gid = os.geteuid(), os.getegid()
            call("unshare", NEWUSER)
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open("/proc/self/" + name, "w") as file:
                    file.write(text)
        call("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS)

    def build_root(self):
        """A root of read-only binds on a tmpfs, in place of the host's."""
        mount(None, "/", None, _REC | _PRIVATE)
        sources = {path: os.open(path, os.O_PATH) for path in self.trees if not os.path.islink(path)}
        devices = {path: os.open(path, os.O_PATH) for path in _DEVICES if os.path.exists(path)}
        links = {path: os.readlink(path) for path in self.trees if os.path.islink(path)}
        fds = "/proc/self/fd/{}".format
        root = "/tmp"  # any directory will do, what it hides is held open
        directories = {path: os.path.isdir(fds(fd)) for path, fd in {**sources, **devices}.items()}
        mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
        for path, is_directory in directories.items():
            os.makedirs(root + (path if is_directory else os.path.dirname(path)), exist_ok=True)
            if not is_directory:
                open(root + path, "w").close()
        for path in ("/proc", self.directory):
            os.makedirs(root + path, exist_ok=True)
        for path, target in {**links, "/dev/fd": "/proc/self/fd", "/dev/shm": self.directory}.items():
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(target, root + path)
        for path, fd in sources.items():
            mount(fds(fd), root + path, None, _BIND | _REC)
        attributes = struct.pack("4Q", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
        system_call(_MOUNT_SETATTR, _AT_FDCWD, root.encode(), _AT_RECURSIVE, attributes, len(attributes))
        attributes = struct.pack("4Q", _RDONLY | _NOSUID | _NOEXEC, 0, 0, 0)  # can be written to, but not touched
        for path, fd in devices.items():
            mount(fds(fd), root + path, None, _BIND)
            system_call(_MOUNT_SETATTR, _AT_FDCWD, (root + path).encode(), 0, attributes, len(attributes))
        for fd in (*sources.values(), *devices.values()):
            os.close(fd)
        mount("proc", root + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
        os.chdir(root)
        system_call(_PIVOT_ROOT[os.uname().machine], b".", b".")
        call("umount2", b".", _MNT_DETACH)
        os.chdir("/")
        call("sethostname", b"sandbox", 7)
        self._own_processes = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def fork(self):
        """fork() whose child is the first process of a new process namespace."""
        call("unshare", NEWPID)
        try:
            pid = os.fork()
        except OSError:
            call("setns", self._own_processes, NEWPID)
            raise
        if pid:
            call("setns", self._own_processes, NEWPID)
        return pid

    def confine(self, number):
        """For good: private mounts, another user, limits, no capabilities, the filter."""
        uid = _FIRST_UID + number % _UIDS if self.as_root else 0
        self._reusable = not shares_memory()
        self._load = os.open("/proc/loadavg", os.O_RDONLY)
        self._cpu_seconds = [lower(resource.RLIMIT_CPU, self.limits["cpu_seconds"])] * 2
        call("unshare", NEWNS)
        size = f"mode=1777,size={self.limits['max_file_mb']}m,nr_inodes=20k"
        mount("tmpfs", self.directory, "tmpfs", _NOSUID | _NODEV, size)
        read_only = _RDONLY | _NOSUID | _NODEV | _NOEXEC
        try:
            mount("proc", "/proc", "proc", read_only, "subset=pid")
        except OSError:  # a kernel before 5.8, or a /proc that is partly hidden: none at all then
            mount("tmpfs", "/proc", "tmpfs", read_only)
        os.chdir(self.directory)
        os.setsid()
        if self.as_root:
            become(uid)
        try:
            call("unshare", NEWUSER)  # in which max_processes is counted for this sandbox alone
        except OSError:
            if not self.as_root:  # else the sandbox's own user id does it
                raise
        set_limits({**self.limits, "max_processes": self.limits["max_processes"] + 1})
        no_new_privileges()
        drop_capabilities()
        call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # calls have the same user and must not look into this process
        if self.filter:
            apply_seccomp(self.filter)
        self._directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        self._empty_size, self._inode = os.fstat(self._directory).st_size, self._new_inode()
        self._attributes = attributes_of(self._directory)

    def begin_call(self):
        """In the process that is to run the call's code."""
        prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, self._cpu_seconds)

    def end_call(self, pid):
        """Wait for the call's process, kill and reap all that it has left; the process' status."""
        ended = None
        while ended != pid:
            ended, status = os.waitpid(-1, 0)
        try:
            os.kill(-1, signal.SIGKILL)
            while True:
                os.wait()
        except (ProcessLookupError, ChildProcessError):
            return status

    def is_clean(self, pid):
        """Whether nothing tells the next call of the one that process `pid` has run.

        The kernel numbers processes, threads and files in the order in which they are made. So the last process of the
        namespace is `pid` if the call has started none, and a new file has the number after that of the last new file
        if the call has made none. The size of a directory in memory tells its number of files.
        """
        try:
            last_pid = int(os.pread(self._load, 256, 0).rsplit(None, 1)[-1])
            self._inode, expected = self._new_inode(), self._inode + 1
            os.utime(self._directory)
            empty = self._inode == expected and os.fstat(self._directory).st_size == self._empty_size
            # root's directory is out of a call's reach
            unchanged = self.as_root or attributes_of(self._directory) == self._attributes
        except OSError:  # such as a full file system
            return False
        return self._reusable and last_pid == pid and empty and unchanged

    def _new_inode(self):
        file = os.open(".", os.O_TMPFILE | os.O_RDWR, dir_fd=self._directory)
        number = os.fstat(file).st_ino
        os.close(file)
        return number

    def clean_up(self):
        """Nothing: the namespaces end with their first process."""


class Process:
    """The weak level: `confine` in the process to be confined, under a supervisor that ends what it leaves."""

    kill_with_supervisor = True

    def __init__(self, limits):
        self.limits, self.trees, self.as_root = limits, interpreter_trees(), os.geteuid() == 0
        self.directory, self.landlock = None, landlock_version() > 0
        self.missing = ["namespaces", "a limit on the sum of files"]
        self.missing += [] if seccomp_filter() else ["seccomp (unknown processor)"]
        self.missing += [] if self.landlock else ["Landlock: files that the user may read can be read"]
        self.missing += [] if self.as_root else ["another user: attributes of own files can be changed"]

    def make_directory(self):
        import tempfile

        self.directory = tempfile.mkdtemp(prefix="python_tool_")
        tempfile.tempdir = None  # found anew in the call, from its TMPDIR

    def confine(self, number):
        """For good: another user, limits, Landlock, no capabilities, the filter."""
        os.chdir(self.directory)
        os.setsid()
        if self.as_root:
            uid = _FIRST_UID + number % _UIDS
            os.chown(self.directory, uid, uid)
            call("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)
            become(uid)
        set_limits(self.limits)
        no_new_privileges()
        # the interpreter may lie where another user cannot pass, such as /root; Landlock leaves only its own tree
        drop_capabilities(1 << _CAP_DAC_READ_SEARCH if self.as_root and self.landlock else 0)
        if self.landlock:
            apply_landlock(self.trees + ["/dev/zero", "/dev/random", "/dev/urandom"], [self.directory, "/dev/null"])
        program = seccomp_filter(own_signals_only=True, pid=os.getpid())
        if program:
            apply_seccomp(program)

    def begin_call(self):
        """In the process that is to run the call's code."""
        set_limit("CPU", self.limits["cpu_seconds"])

    def clean_up(self):
        """Remove the call's directory. All its processes are gone, so nobody moves links under our feet."""
        import shutil

        for path, directories, _ in os.walk(self.directory):
            for name in directories:
                if not os.path.islink(os.path.join(path, name)):
                    os.chmod(os.path.join(path, name), 0o700)
        shutil.rmtree(self.directory)


LEVELS = {"namespaces": Namespaces, "process": Process}


def become(uid):
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities(kept=0):
    """All but the bits in `kept`; those are lost with the next program executed."""
    header = struct.pack("Ii", 0x20080522, 0)
    call("capset", header, struct.pack("6I", kept, kept, 0, 0, 0, 0))


def shares_memory():
    """Whether a process forked from here would share writable memory with us, as a preloaded module may have made."""
    with open("/proc/self/maps") as maps:
        return any(line.split()[1] == "rw-s" for line in maps)


def attributes_of(directory):
    """All but its times that the owner of an open directory may change."""
    status = os.fstat(directory)
    try:
        flags = fcntl.ioctl(directory, _GETFLAGS, bytes(8))
    except OSError:  # the file system has none
        flags = None
    return status.st_mode, status.st_uid, status.st_gid, os.listxattr(directory), flags


def set_limits(limits):
    """For each process: memory, file size, open files; processes for the sandbox's user or namespace."""
    mib = 1 << 20
    for name, value in (
        ("AS", limits["memory_mb"] * mib),
        ("FSIZE", limits["max_file_mb"] * mib),
        ("NPROC", limits["max_processes"]),
        ("NOFILE", 256),
        ("CORE", 1),  # not 0, which the kernel does not apply to a core pattern that is a pipe
        ("MEMLOCK", 64 << 10),
        ("MSGQUEUE", 0),
        ("SIGPENDING", 64),
        ("NICE", 0),
        ("RTPRIO", 0),
    ):
        set_limit(name, value)


def set_limit(name, value):
    """A resource limit for good, or a lower one that there is already."""
    which = getattr(resource, "RLIMIT_" + name)
    value = lower(which, value)
    resource.setrlimit(which, (value, value))


def lower(which, value):
    """A resource limit's value, or the hard limit where that is lower."""
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)
