"""Files that the processes of one node share: a private folder for them, and how to tell a network file system."""

import os
import re
import stat
import tempfile
from pathlib import Path

# types in /proc/mounts; a FUSE file system has its name behind "fuse."
NETWORK_TYPES = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "wekafs", "panfs"}
NETWORK_TYPES |= {"pvfs2", "orangefs", "glusterfs", "sshfs", "s3fs", "gcsfuse", "goofys", "juicefs", "rclone"}
NETWORK_TYPES |= {"blobfuse", "blobfuse2", "moosefs"}


def node_folder(purpose: str) -> Path:
    """A folder of this user's in the node's temporary directory (TMPDIR, else /tmp), mode 0700; made if absent.

    It is the same for all processes of the user on the node and stays when they end. Its name is predictable, so what
    lies there is used only if nobody else could have put it there.

    Args:
        purpose: the folder is `verl_<purpose>_<user id>`.

    Raises:
        ValueError: it is a link or no folder, another user's, or open to others.
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


def network_file_system(path: str | Path, mounts: str | None = None) -> str | None:
    """The type of the network file system that a path, which need not exist, would lie on; None: on a local one.

    Args:
        mounts: in the form of /proc/mounts, which is read without it; where there is none, every path counts as local.
    """
    if mounts is None:
        table = Path("/proc/self/mounts")
        mounts = table.read_text(errors="replace") if table.exists() else ""
    path = Path(os.path.realpath(Path(path).expanduser()))
    deepest, kind = -1, ""
    for line in mounts.splitlines():
        _, point, mounted, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)
        if path.is_relative_to(point) and len(point) >= deepest:  # of two mounts at one place the later one counts
            deepest, kind = len(point), mounted
    kind = kind.removeprefix("fuse.")
    return kind if kind in NETWORK_TYPES else None
