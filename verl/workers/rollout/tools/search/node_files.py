"""A private folder for files that the processes of one node share."""

import os
import stat
import tempfile
from pathlib import Path


def node_folder(purpose: str) -> Path:
    """Return the user's folder verl_<purpose>_<user id> in the node's temporary directory (TMPDIR, else /tmp), mode
    0700; made if absent.

    It is the same for all processes of the user on the node and stays when they end. Its name is predictable, so
    ValueError is raised if it is a link or no folder, belongs to another user, or is open to others.
    """
    folder = Path(tempfile.gettempdir()) / f"verl_{purpose}_{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{folder} is a link or a file, expected a folder of yours; move it away")
    if status.st_uid != os.getuid():
        raise ValueError(f"{folder} is not yours but user {status.st_uid}'s; set TMPDIR to another place")
    if status.st_mode & 0o077:
        raise ValueError(f"{folder} is open to other users: look at what it holds, then chmod 700 it or delete it")
    return folder
