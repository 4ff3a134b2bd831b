"""Lets one run at a time use a folder. The launcher loads this file by its path: to import `verl` takes seconds."""

import fcntl
import os
import sys
from pathlib import Path

LOCK = ".lock"


def hold_folder(folder: Path) -> int:
    """Create a folder if it is missing, and lock it while the returned descriptor is open, here or in a child. A
    ValueError names the process and host of another run that holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    except BlockingIOError:
        holder = os.read(lock, 300).decode(errors="replace") or "its process is not known"
        os.close(lock)
        raise ValueError(
            f"another run uses {folder} ({holder}): wait for its end, or choose another EXPERIMENT_NAME or RUN_DIR"
        ) from None
    except OSError as error:  # a file system without locks
        print(f"warning: {folder} cannot be locked ({error}); no second run may use it", file=sys.stderr)
    return lock
