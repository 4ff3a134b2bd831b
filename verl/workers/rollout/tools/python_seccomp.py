"""What a sandboxed process may still ask of the kernel: a seccomp filter over system calls, Landlock over files.

Plain standard library from Python 3.8 on: the sandbox's interpreter need not be the trainer's.
"""

import ctypes
import errno
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
prctl = libc.prctl

# name: number on x86_64, number on aarch64 (-1: has none)
_SYSCALLS = {
    **{"socket": (41, 198), "bind": (49, 200), "listen": (50, 201), "connect": (42, 203), "setsockopt": (54, 208)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "userfaultfd": (323, 282)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"process_madvise": (440, 440), "pidfd_getfd": (438, 438), "perf_event_open": (298, 241), "bpf": (321, 280)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97)},
    **{"setns": (308, 268), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218)},
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262)},
    **{"inotify_init": (253, -1), "inotify_init1": (294, 26), "init_module": (175, 105), "finit_module": (313, 273)},
    **{"delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60)},
    **{"quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171)},
    **{"clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "personality": (135, 92)},
    **{"iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "setpriority": (141, 140)},
    "ioprio_set": (251, 30),
}
_CLONE, _CLONE3, _PRCTL, _SOCKETPAIR = (56, 220), (435, 435), (157, 167), (53, 199)
# their first argument is a process, 0 for the caller
_ON_A_PROCESS = ((302, 261), (203, 122), (144, 119), (142, 118), (314, 274))  # prlimit64, sched_set...
# kill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo take a process first; tkill a thread, pidfd_send_signal a descriptor
_SIGNALS, _OTHER_SIGNALS = ((62, 129), (234, 131), (129, 138), (297, 240)), ((200, 130), (424, 424))
# a descriptor's owner, to whom the kernel sends signals for it: fcntl's F_SETOWN(_EX), ioctl's FIOSETOWN and SIOCSPGRP
_FCNTL, _SET_OWNER, _IOCTL, _SET_SOCKET_OWNER = (72, 25), (8, 15), (16, 29), (0x8901, 0x8902)
_NEW_NAMESPACES = 0x7E020000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _AF_UNIX = 1, 22, 38, 1
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data


def call(name, *args):
    """A libc function by name; OSError where it returns -1."""
    result = getattr(libc, name)(*args)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def system_call(number, *args):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def seccomp_filter(own_signals_only=False, pid=0):
    """A BPF program (bytes) that denies with EPERM what could reach out of the sandbox, or None on another processor.

    Args:
        own_signals_only: signals only to `pid` itself, for a sandbox without a process namespace of its own; else no
            signals to process 1, the first of the namespace.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
        return None
    column, arch = _ARCHITECTURES[machine]
    deny = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    program += [(_AT_LEAST, 0, 1, 0x40000000), deny]  # x32 has numbers of its own

    def refuse(numbers, code=errno.EPERM):
        if numbers[column] >= 0:
            program.extend([(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | code)])

    def refuse_argument(numbers, test, value, when, argument=_FIRST_ARGUMENT):
        jumps = (0, 1) if when else (1, 0)
        program.extend([(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, argument), (test, *jumps, value), deny])
        program.append((_LOAD, 0, 0, _NUMBER))

    for numbers in _SYSCALLS.values():
        refuse(numbers)
    refuse(_CLONE3, errno.ENOSYS)  # its flags lie in memory, out of a filter's sight; libc falls back to clone
    refuse_argument(_CLONE, _ANY_BIT, _NEW_NAMESPACES, True)
    refuse_argument(_PRCTL, _EQUAL, _PR_SET_PDEATHSIG, True)
    refuse_argument(_SOCKETPAIR, _EQUAL, _AF_UNIX, False)
    for numbers, commands in ((_FCNTL, _SET_OWNER), (_IOCTL, _SET_SOCKET_OWNER)):
        for command in commands:
            refuse_argument(numbers, _EQUAL, command, True, _SECOND_ARGUMENT)
    for numbers in _ON_A_PROCESS:
        refuse_argument(numbers, _EQUAL, 0, False)
    for numbers in _SIGNALS:
        refuse_argument(numbers, _EQUAL, pid if own_signals_only else 1, not own_signals_only)
    if own_signals_only:
        for numbers in _OTHER_SIGNALS:
            refuse(numbers)
    return b"".join(struct.pack("HBBI", *line) for line in [*program, (_RETURN, 0, 0, _ALLOW)])


def no_new_privileges():
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def apply_seccomp(program):
    """From here on, for good, for this process and all that it starts. Needs no_new_privileges first."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)))
    call("prctl", _PR_SET_SECCOMP, 2, fprog, 0, 0)


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 2, 4, 8, 1 << 14


def landlock_version():
    """Of the kernel's Landlock, 0 without."""
    try:
        return system_call(_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def apply_landlock(readable, writable):
    """Files from here on: `readable` paths with what lies below to be read and executed, `writable` ones also changed,
    nothing else. Attributes (chmod, utime, stat) are not covered. Needs no_new_privileges first."""
    every = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}.get(landlock_version(), 0xFFFF)
    rules = system_call(_CREATE_RULESET, struct.pack("Q", every), 8, 0)
    for paths, access in ((readable, _EXECUTE | _READ_FILE | _READ_DIR), (writable, every)):
        for path in filter(os.path.exists, paths):
            allowed = access if os.path.isdir(path) else access & (_EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE)
            fd = os.open(path, os.O_PATH)
            system_call(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed & every, fd), 0)
            os.close(fd)
    system_call(_RESTRICT_SELF, rules, 0)
    os.close(rules)
