"""Helpers for files that the processes of one node share: a private folder, and a check for network file systems."""

import os
import stat
import tempfile
from pathlib import Path

# Types in /proc/mounts. The type of a FUSE file system is "fuse." and its name.
NETWORK_TYPES = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "wekafs", "panfs"}
NETWORK_TYPES |= {"pvfs2", "orangefs", "glusterfs", "sshfs", "s3fs", "gcsfuse", "goofys", "juicefs", "rclone"}
NETWORK_TYPES |= {"blobfuse", "blobfuse2", "moosefs"}


def node_folder(purpose: str) -> Path:
    """Return the user's folder in the node's temporary directory (TMPDIR, else /tmp), mode 0700; made if absent.

    It is the same for all processes of the user on the node and stays when they end. Its name is predictable, so it is
    used only if nobody else can write to it.

    Args:
        purpose: part of the folder's name `verl_<purpose>_<user id>`.

    Raises:
        ValueError: the path is a link or no folder, belongs to another user, or is open to others.
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


def network_file_system(path: str | Path) -> str | None:
    """Return the type of the network file system that a path, which need not exist, is on; None for a local one."""
    import psutil  # imported here, so that `node_folder` needs the standard library only

    path = Path(os.path.realpath(Path(path).expanduser()))
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    # The deepest mount counts, and among mounts of the same place the latest.
    kinds = [mount.fstype for mount in sorted(mounts, key=lambda mount: len(mount.mountpoint))]
    kind = kinds[-1].removeprefix("fuse.") if kinds else ""
    return kind if kind in NETWORK_TYPES else None
