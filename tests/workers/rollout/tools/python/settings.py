"""Runs a command with the rights of a setting in which the Python tool is tested.

    python tests/workers/rollout/tools/python/settings.py container python -c 'import os; os.unshare(0x20000)'

Root can enter every setting, another user only `user`.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

SETTINGS = {
    "root": "root with all capabilities of this machine",
    "container": "root with the 14 capabilities of a default Docker container, without unshare and mount",
    "user": "an ordinary user, without any capability",
}
# Docker's default capabilities: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE,
# NET_RAW, SYS_CHROOT, MKNOD, AUDIT_WRITE, SETFCAP
DOCKER = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
UNSHARE, MOUNT, LANDLOCK = {"x86_64": (272, 165, 444), "aarch64": (97, 40, 444)}[platform.machine()]
_CAPBSET_DROP, _SET_SECCOMP, _SET_NO_NEW_PRIVS, _NEW_USER = 24, 22, 38, 0x10000000
libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args) -> None:
    if getattr(libc, name)(*args) == -1:
        raise OSError(ctypes.get_errno(), name)


def refuse(numbers: list[int]) -> None:
    """Let these system calls fail with ENOSYS, in this process and in all that it starts."""
    lines = [(0x20, 0, 0, 0)]
    for number in numbers:
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.ENOSYS)]
    program = b"".join(struct.pack("HBBI", *line) for line in [*lines, (0x06, 0, 0, 0x7FFF0000)])
    buffer = ctypes.create_string_buffer(program, len(program))
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)), 0, 0)


def keep_capabilities(kept: tuple[int, ...]) -> None:
    """Drop all Linux capabilities except those with these numbers."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in set(range(last + 1)) - set(kept):
        _call("prctl", _CAPBSET_DROP, capability, 0, 0, 0)
    low = sum(1 << capability for capability in kept)
    _call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", low, low, 0, 0, 0, 0))


def enter(setting: str) -> None:
    """Give up the rights that the setting does not have, for the rest of the process's life."""
    if setting == "container":
        keep_capabilities(DOCKER)
        refuse([UNSHARE, MOUNT])
    elif setting == "without landlock":
        refuse([LANDLOCK])
    elif setting == "user" and os.geteuid() == 0:
        # A user namespace, because a process with another user id could not read an interpreter below /root.
        _call("unshare", _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", "1000 0 1"), ("gid_map", "1000 0 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def command_in(setting: str, command: list[str]) -> list[str]:
    """Return the command line that runs `command` in a setting."""
    return command if setting == "root" else [sys.executable, os.path.abspath(__file__), setting, *command]


if __name__ == "__main__":
    enter(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])
