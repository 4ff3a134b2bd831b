"""Programs that attack the sandbox, bounded by themselves. Each prints HARM (first in a line) where it succeeds.

@PARENT@ (the trainer), @SENTINEL@ (a process of its user), @PORT@, @ABSTRACT@, @SECRET@, @KEEP@ (a file that must not
change) and @MARK@ (seconds to sleep, by which a process left behind is found) are filled in. The limits are 256 MiB of
memory and 16 MiB of files.
"""

_SYSCALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def syscall(x86, arm, *args):
    number = x86 if platform.machine() == "x86_64" else arm
    return libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
"""

PROGRAMS = {
    # time, processes, memory, disk
    "endless loop": "while True: pass",
    "endless loop in C": "9**9**9",
    "backtracking": "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
    "sleep, signals ignored": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(60)""",
    "stops itself": "import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
    "fork bomb": """
import os, time
made = 0
for _ in range(200):
    try:
        if os.fork() == 0: time.sleep(60)
        made += 1
    except OSError: break
print("HARM" if made > 100 else made)""",
    "fork bomb of daemons": """
import os, time
for _ in range(7):
    try:
        os.fork(); os.setsid()
    except OSError: pass
time.sleep(60)""",
    "threads": """
import threading, time
made = 0
for _ in range(200):
    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError: break
    made += 1
print("HARM" if made > 100 else made)""",
    "memory": "kept = [bytearray(b'x') * (64 << 20) for _ in range(64)]; print('HARM')",
    "memory of many": """
import os, time
read, write = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        kept = b"x" * (200 << 20); os.write(write, b"k"); time.sleep(60)
os.read(read, 1); os.read(read, 1); time.sleep(3); print("HARM")""",
    "shared memory": "import mmap; kept = [mmap.mmap(-1, 256 << 20) for _ in range(16)]; print('HARM')",
    "memfd": "import os\nkept = [os.memfd_create('x') for _ in range(4)]; print('HARM')",
    "System V memory": _SYSCALL + "if syscall(29, 194, 0, 1 << 20, 0o1600) >= 0: print('HARM')",
    "many files": """
for number in range(40):
    with open(f"big{number}", "wb") as file:
        for _ in range(15): file.write(b"x" * (1 << 20)); file.flush()
print("HARM")""",
    "many empty files": """
for number in range(100_000): open(str(number), "w").close()
print("HARM")""",
    "removed files": """
import os, time
kept = []
for _ in range(40):
    kept.append(open("a", "wb"))
    kept[-1].write(b"x" * (2 << 20)); kept[-1].flush(); os.remove("a"); time.sleep(0.02)
print("HARM")""",
    "removed files that are mapped": """
import mmap, os, time
kept = []
for _ in range(40):
    with open("a", "w+b") as file:
        file.write(b"x" * (2 << 20)); file.flush(); kept.append(mmap.mmap(file.fileno(), 4096))
    os.remove("a"); time.sleep(0.02)
print("HARM")""",
    "a file without a name": """
import os
try: os.open(".", os.O_TMPFILE | os.O_RDWR); print("HARM")
except OSError: pass""",
    "removed files in another table of descriptors": _SYSCALL
    + """
import threading, time
def hold():
    if syscall(436, 436, 500, 501, 2) != 0: return print("refused")
    kept = []
    for _ in range(30):
        kept.append(open("a", "wb"))
        kept[-1].write(b"x" * (2 << 20)); kept[-1].flush(); os.remove("a"); time.sleep(0.02)
    print("HARM")
thread = threading.Thread(target=hold)
thread.start(); thread.join()""",
    "removed files after the main thread's end": _SYSCALL
    + """
import threading, time
def hold():
    time.sleep(0.1)
    kept = []
    for _ in range(30):
        kept.append(open("a", "wb"))
        kept[-1].write(b"x" * (2 << 20)); kept[-1].flush(); os.remove("a"); time.sleep(0.05)
    os.write(1, b"HARM")
threading.Thread(target=hold).start()
syscall(60, 93, 0)""",
    "a thread with descriptors of its own": _SYSCALL
    + """
stack = ctypes.create_string_buffer(1 << 16)
if syscall(56, 220, 0x10900, ctypes.addressof(stack) + (1 << 15), 0, 0, 0) > 0: print("HARM")""",
    "a name that is no text": """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\xff"); time.sleep(0.3)""",
    "a mapped file whose name is no text": """
import mmap, time
with open(b"\\xff", "w+b") as file:
    file.write(b"x"); file.flush(); kept = mmap.mmap(file.fileno(), 1); time.sleep(0.3)""",
    "no core instead of a short one": """
import resource
try: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print("HARM")
except (ValueError, OSError): pass""",
    "urgent data": """
import socket
try: socket.socketpair()[0].send(b"x", socket.MSG_OOB); print("HARM")
except OSError: pass""",
    "filled socket pairs": """
import socket
held, kept = 0, []
for _ in range(1000):
    try: kept += socket.socketpair()
    except OSError: break
for end in kept:
    end.setblocking(False)
    try:
        while True: held += end.send(b"x" * 65536)
    except OSError: pass
if held > 64 << 20: print("HARM", held)""",
    "sent descriptors": """
import array, os, socket
a, b = socket.socketpair()
for _ in range(500):
    fd = os.open("/dev/null", 0)
    try: a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]); print("HARM")
    except OSError: pass
    os.close(fd)""",
    "large pipes": """
import fcntl, os
try: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20); print("HARM")
except OSError: pass""",
    "big file": """
written = 0
with open("big", "wb") as file:
    for _ in range(300): written += file.write(b"x" * (1 << 20)); file.flush()
print("HARM")""",
    "sparse file": "import os; os.truncate(os.open('sparse', os.O_CREAT | os.O_RDWR), 1 << 40); print('HARM')",
    "open files": "kept = [open('/dev/null') for _ in range(3000)]; print('HARM')",
    "pipes": "import os; kept = [os.pipe() for _ in range(2000)]; print('HARM')",
    "inotify": _SYSCALL + "if syscall(294, 26, 0) >= 0: print('HARM')",
    "threads with small stacks": """
import threading, time
threading.stack_size(65536)
made = 0
for _ in range(2000):
    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError: break
    made += 1
time.sleep(0.5); print("HARM", made)""",
    "more of a limit": """
import resource
for which, value in ((resource.RLIMIT_NOFILE, 4000), (resource.RLIMIT_AS, 1 << 40), (resource.RLIMIT_CPU, 9999)):
    try: resource.setrlimit(which, (value, value)); print("HARM")
    except (ValueError, OSError): pass""",
    # output
    "flood": "while True: print('x' * 100000)",
    "flood of errors": """
import os
for _ in range(2): os.fork()
while True: os.write(2, b"y" * 65536)""",
    "one long line": "print('z' * 50_000_000)",
    # crashes
    "null pointer": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "deep recursion": "import sys; sys.setrecursionlimit(10**8)\ndef f(): f()\nf()",
    "deep C recursion": "x = []\nfor _ in range(10**6): x = [x]\nprint(len(repr(x)))",
    "_exit": "import os; os._exit(7)",
    "exit codes of ours": "import os; os._exit(99)",
    "core dump": """
import os, resource
try: resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30)); print("HARM")
except (ValueError, OSError): pass
os.kill(os.getpid(), 6); os.abort()""",
    "deep nesting": "(" * 100_000,
    "NUL and half a pair": "print('\x00\ud800')",
    # signals and other processes
    "kill the trainer": """
import os
for pid in (@PARENT@, @SENTINEL@, os.getppid() or @PARENT@):
    for number in (9, 15, 19):
        try: os.kill(pid, number); print("HARM")
        except OSError: pass""",
    "a signal by a socket's owner": """
import fcntl, os, socket, struct, time
F_SETSIG, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 10, 15, 0x8901, 0x8902
def by_fcntl(end, pid): fcntl.fcntl(end, fcntl.F_SETOWN, pid)
def by_fcntl_ex(end, pid): fcntl.fcntl(end, F_SETOWN_EX, struct.pack("ii", 1, pid))
def by_ioctl(end, pid): fcntl.ioctl(end, FIOSETOWN, struct.pack("i", pid))
def by_ioctl_of_sockets(end, pid): fcntl.ioctl(end, SIOCSPGRP, struct.pack("i", pid))
for pid in (@SENTINEL@, @PARENT@):
    for own in (by_fcntl, by_fcntl_ex, by_ioctl, by_ioctl_of_sockets):
        end, other = socket.socketpair()
        try: own(end, pid)
        except OSError: continue
        print("HARM", own.__name__)
        if pid == @SENTINEL@:
            fcntl.fcntl(end, F_SETSIG, 9)
            fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)
            other.send(b"x"); time.sleep(0.1)""",
    "kill everybody": "import os\ntry: os.kill(-1, 15)\nexcept OSError: pass",
    "kill the first process": """
import os
if os.getpid() != 1:
    try: os.kill(1, 9); print("HARM")
    except OSError: pass""",
    "kill the group": "import os, signal; signal.signal(15, signal.SIG_IGN); os.killpg(0, 15)",
    "ptrace": _SYSCALL + "if syscall(101, 117, 16, @SENTINEL@, 0, 0) == 0: print('HARM')",
    "memory of the trainer": """
for pid in (@PARENT@, @SENTINEL@):
    for name in ("environ", "mem", "maps", "cmdline", "fd/0"):
        try: open(f"/proc/{pid}/{name}", "rb").read(1); print("HARM")
        except OSError: pass""",
    "process_vm_readv": _SYSCALL
    + """
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here = ctypes.create_string_buffer(8); local = Vector(ctypes.addressof(here), 8)
result = syscall(310, 270, @SENTINEL@, ctypes.byref(local), 1, ctypes.byref(local), 1, 0)
if result >= 0: print("HARM")""",
    "limits of the trainer": """
import os, resource
for act in (lambda: resource.prlimit(@PARENT@, resource.RLIMIT_NOFILE, (5, 5)),
            lambda: os.setpriority(os.PRIO_PROCESS, @PARENT@, 19),
            lambda: os.sched_setaffinity(@SENTINEL@, {0})):
    try: act(); print("HARM")
    except OSError: pass""",
    # secrets and files
    "environment": "import os; print(dict(os.environ))",
    "home directories": """
import os, sys
ours = set((sys.prefix + os.sep + sys.base_prefix).split(os.sep))  # the way to the interpreter may be seen
for path in ("/root", "/home", "/var", "/run", "/sys", "/boot"):
    try: names = os.listdir(path)
    except OSError: continue
    if set(names) - ours: print("HARM", path)""",
    "shadow": "print('HARM', open('/etc/shadow').read())",
    "secret file": "print('HARM', open('@SECRET@').read())",
    "symbolic link": "import os; os.symlink('@SECRET@', 'a'); print('HARM', open('a').read())",
    "hard link": "import os; os.link('@SECRET@', 'b'); print('HARM', open('b').read())",
    "dots": "print('HARM', open('../../../../../../../..@SECRET@').read())",
    "a shell": """
import subprocess
print(subprocess.run("cat @SECRET@ /etc/shadow", shell=True, capture_output=True).stdout)""",
    "writing outside": """
import os
for path in ("/usr/harm", "/etc/harm", "/root/harm", "/dev/harm", "/harm", "/var/tmp/harm", "@KEEP@"):
    try: open(path, "w").write("x")
    except OSError: continue
    if path != "@KEEP@": print("HARM", path)""",
    "attributes outside": """
import os
for act in (lambda: os.chmod("@KEEP@", 0o777), lambda: os.utime("@KEEP@", (1, 1)), lambda: os.chown("@KEEP@", 1, 1),
            lambda: os.setxattr("@KEEP@", "user.a", b"b"), lambda: os.lchown("@KEEP@", 1, 1),
            lambda: os.chmod("@KEEPDIR@", 0o777), lambda: os.utime("@KEEPDIR@", (1, 1))):
    try: act()
    except OSError: pass""",
    "truncating outside": """
import os, sys
for path in ("@KEEP@", os.__file__):
    size = os.stat(path).st_size
    for act in (lambda: os.truncate(path, 0), lambda: os.open(path, os.O_RDONLY | os.O_TRUNC)):
        try: act()
        except OSError: pass
    if os.stat(path).st_size != size: print("HARM", path)""",
    "removing and renaming outside": """
import os
for act in (lambda: os.remove("@KEEP@"), lambda: os.rename("@KEEP@", "mine"), lambda: os.link("@SECRET@", "mine"),
            lambda: os.symlink("@SECRET@", "mine2"), lambda: open("mine3", "w").close() or os.rename("mine3", "@KEEP@"),
            lambda: os.mkdir("@KEEPDIR@/new"), lambda: os.mknod("@KEEPDIR@/new2")):
    try: act(); print("HARM")
    except OSError: pass""",
    "folders of other programs": """
import os
try: os.listdir(".."); print("HARM")
except OSError: pass
if any(os.path.exists(f"../{number}") for number in range(300)): print("HARM")""",
    "nested folders with long names": """
import os
for _ in range(40):
    try: os.mkdir("n" * 200); os.chdir("n" * 200)
    except OSError: break
else: print("HARM")""",
    "writing the interpreter": """
import os, sys
for path in (sys.executable, os.__file__, sys.prefix + "/harm"):
    try: open(path, "ab").write(b""); print("HARM")
    except OSError: pass""",
    "removing": "import os, shutil; [shutil.rmtree(p, ignore_errors=True) for p in ('@KEEPDIR@', os.getcwd())]",
    "links for the one who cleans up": """
import os
os.symlink("@KEEPDIR@", "d"); os.makedirs("x/y"); os.symlink("@KEEP@", "x/y/z")
os.chmod("x/y", 0); os.chmod("x", 0)""",
    "no directory": "import os, shutil; d = os.getcwd(); shutil.rmtree(d, ignore_errors=True); os.getcwd()",
    "kernel settings": """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper", "/proc/self/uid_map"):
    try: open(path, "wb", buffering=0).write(b"0 0 1"); print("HARM", path)
    except OSError: pass""",
    "control groups": "import os; os.mkdir('/sys/fs/cgroup/harm'); print('HARM')",
    "devices": """
import os
for path in ("/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/ptmx", "/dev/fuse", "/dev/kvm", "/dev/shm/../kmsg"):
    try: os.open(path, os.O_RDWR); print("HARM", path)
    except OSError: pass""",
    # network
    "TCP": "import socket; socket.create_connection(('127.0.0.1', @PORT@), 1); print('HARM')",
    "UDP": "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', @PORT@)); print('HARM')",
    "abstract socket": "import socket; s = socket.socket(1); s.connect('\\0@ABSTRACT@'); print('HARM')",
    "abstract socket by a datagram pair": """
import socket
try: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", "\\0@ABSTRACT@"); print("HARM")
except OSError: pass""",
    "name service": "import socket; socket.getaddrinfo('localhost', 80, family=16); print('HARM')",
    "netlink": "import socket; socket.socket(16, 3, 0); print('HARM')",
    "io_uring": _SYSCALL + "if syscall(425, 425, 4, ctypes.create_string_buffer(256)) >= 0: print('HARM')",
    # privileges
    "mount": _SYSCALL + "if libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0: print('HARM')",
    "unmount": _SYSCALL + "[print('HARM') for p in (b'/proc', b'/tmp', b'/') if libc.umount2(p, 2) == 0]",
    "user namespace": _SYSCALL + "if libc.unshare(0x10000000) == 0: print('HARM')",
    "clone": _SYSCALL
    + """
pid = syscall(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: print("HARM")""",
    "other ways to fork": _SYSCALL
    + """
for x86, arm, *args in ((57, 220, 17, 0, 0, 0, 0), (58, 220, 0x4111, 0, 0, 0, 0), (56, 220, 17, 0, 0, 0, 0),
                        (435, 435, ctypes.create_string_buffer(88), 88)):
    pid = syscall(x86, arm, *args)
    if pid == 0: os._exit(0)
    if pid > 0: print("HARM", x86)""",
    "running another program": _SYSCALL
    + """
arguments = (ctypes.c_char_p * 2)(b"/usr/bin/id", None)
libc.execve(b"/usr/bin/id", arguments, None)
os.posix_spawn("/usr/bin/id", ["id"], {})""",
    "signals by other calls": _SYSCALL
    + """
for x86, arm, *args in ((200, 130, @SENTINEL@, 15), (129, 138, @SENTINEL@, 15, ctypes.create_string_buffer(128)),
                        (234, 131, @SENTINEL@, @SENTINEL@, 15), (434, 434, @SENTINEL@, 0)):
    if syscall(x86, arm, *args) >= 0: print("HARM", x86)""",
    "asynchronous input": _SYSCALL + "if syscall(206, 0, 65536, ctypes.create_string_buffer(8)) >= 0: print('HARM')",
    "chroot": "import os; os.chroot('.'); print('HARM')",
    "mknod": "import os, stat; os.mknod('mem', 0o666 | stat.S_IFCHR, os.makedev(1, 1)); print('HARM')",
    "setuid": """
import os
for become in (os.setuid, os.setgid, os.seteuid):
    try: become(0)
    except OSError: continue
    if os.geteuid() == 0: print("HARM")""",
    "set-uid programs": """
import subprocess
for command in (["su", "-c", "id"], ["mount", "-t", "tmpfs", "x", "."]):
    try: done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired): continue
    if done.returncode == 0: print("HARM")""",
    "keys, bpf, perf": _SYSCALL
    + """
for x86, arm, *args in ((250, 219, 0, -3, 0, 0), (321, 280, 0, 0, 0), (298, 241, 0, 0, -1, -1, 0), (323, 282, 0)):
    if syscall(x86, arm, *args) >= 0: print("HARM")""",
    # what outlives a call
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execvp("sleep", ["sleep", "@MARK@"])
    os._exit(0)
time.sleep(0.1)""",
    "daemon that ignores": """
import os, signal, time
if os.fork() == 0:
    for number in (1, 2, 13, 15, 17): signal.signal(number, signal.SIG_IGN)
    os.setsid(); os.close(1); os.close(2)
    if os.fork() == 0: time.sleep(@MARK@)
    time.sleep(@MARK@)""",
    "threads that go on": "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(1)",
    "atexit": "import atexit, time; atexit.register(time.sleep, 60); print(1)",
    "other modules": """
import builtins, json, math, sys
builtins.print = math.sqrt = json.dumps = None; builtins.int = 7; sys.modules["os"] = None; sys.path.clear()""",
    # the protocol
    "closes everything": "import os; os.closerange(0, 4096)",
    "writes to descriptors": """
import os
for fd in range(1, 300):
    try: os.write(fd, b"1 0 0 memory\\n7 98 0 -")
    except OSError: pass""",
    "sends descriptors": """
import array, socket
s = socket.socket(fileno=1)
for _ in range(50): s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))])""",
    "looks for the supervisor's objects": """
import gc, socket, sys
for thing in gc.get_objects():
    if isinstance(thing, socket.socket):
        try: thing.send(b"1 0 0 -"); print("HARM")
        except OSError: pass""",
    "parent's death": _SYSCALL + "if libc.prctl(1, 0, 0, 0, 0) == 0: print('HARM')",
    "replaced streams": """
import sys
class Bad:
    def __getattr__(self, name): raise KeyboardInterrupt
sys.stdout = sys.stderr = sys.displayhook = sys.excepthook = Bad()
raise Bad""",
    "an exception that cannot be told": """
class Bad(BaseException):
    def __str__(self): raise SystemExit
    __repr__ = __str__
raise Bad""",
}
