"""Removes the shared memory that killed processes leave in /dev/shm, where it stays until the machine restarts."""

import contextlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Beginnings of names: weights on their way to vLLM (a whole bucket), and multiprocessing's semaphores.
NAMES = ("verl_weights_", "sem.mp-")
# Inodes of the host's own namespaces. With the first, but not the second, as with `docker run --ipc=host`, processes
# that cannot be seen here may use /dev/shm.
HOST_IPC, HOST_PID = 0xEFFFFFFF, 0xEFFFFFFC


def shared_memory() -> set[str]:
    """Return the names of all files in /dev/shm."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def remove_unused(names: tuple[str, ...] = NAMES, keep: frozenset[str] | set[str] = frozenset()) -> None:
    """Remove this user's files in /dev/shm with these beginnings that no process has mapped, except `keep`."""
    unused = {name for name in shared_memory() - keep if name.startswith(names)}
    ipc, pid = (os.stat(f"/proc/self/ns/{kind}").st_ino if unused else 0 for kind in ("ipc", "pid"))
    if not unused or ipc == HOST_IPC and pid != HOST_PID:
        return
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            unused -= {line.rpartition("/")[2] for line in maps.read_text(errors="replace").splitlines()}
    for name in unused:
        with contextlib.suppress(OSError):  # removed meanwhile
            if (SHARED_MEMORY / name).stat().st_uid == os.getuid():
                (SHARED_MEMORY / name).unlink()
