"""A cache of search results (key -> text) on disk, shared by all processes of a machine.

It is one table in SQLite in WAL mode: a process that is killed loses at most the entry that it was writing, and readers
never wait. WAL needs shared memory: keep the file on a local disk, not on a network file system.
"""

import contextlib
import os
import sqlite3
import stat
import tempfile
import threading
from pathlib import Path

WAIT = 30.0  # longest wait for other processes' writes, in seconds
TABLE = "CREATE TABLE IF NOT EXISTS cache (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, text TEXT NOT NULL)"
PUT = "INSERT OR REPLACE INTO cache (key, text) VALUES (?, ?)"
USED_BYTES = """
SELECT page_size * (page_count - freelist_count) FROM pragma_page_size, pragma_page_count, pragma_freelist_count"""
DELETE_OLDEST = "DELETE FROM cache WHERE id <= (SELECT min(id) + (max(id) - min(id)) / 10 FROM cache)"


class SearchCache:
    """A cache of search results. Beyond `size_mb` (10^6 bytes) the entries that were written first are deleted. Raise
    sqlite3.Error if the file cannot be opened."""

    def __init__(self, path: str | Path, *, size_mb: float = 512):
        if not size_mb > 0:
            raise ValueError(f"cache size must be positive, got {size_mb!r} MB")
        self.path = Path(path).expanduser()
        self._limit, self._lock = size_mb * 1e6, threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Autocommit mode. Our lock guards the connection, so it is not bound to one thread.
        self._database = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None, check_same_thread=False)
        with contextlib.suppress(sqlite3.OperationalError):  # another process enters WAL mode in this moment
            self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute(TABLE)

    def get(self, key: str) -> str | None:
        """Return the text of a key, None without one."""
        with self._lock:
            row = self._database.execute("SELECT text FROM cache WHERE key = ?", (key,)).fetchone()
        return row and row[0]

    def put(self, key: str, text: str) -> None:
        """Keep the text in place of an earlier one; when this returns, it is on disk for all processes."""
        with self._lock:
            self._database.execute(PUT, (key, text))
            self._trim()

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _trim(self) -> None:
        """Delete the oldest tenth of the entries until they fit into the limit."""
        deleted = 1
        while deleted and self._one(USED_BYTES) > self._limit:
            deleted = self._database.execute(DELETE_OLDEST).rowcount

    def _one(self, statement: str):
        return self._database.execute(statement).fetchone()[0]


def node_folder() -> Path:
    """Return the folder of `cache_file=node_local`: verl_search_cache_<user id> in the node's temporary directory
    (TMPDIR, else /tmp), mode 0700; made if absent. All processes of the user on the node share it, and it stays.

    Its name is predictable: raise ValueError if it is a link or no folder, another user's, or open to others.
    """
    folder = Path(tempfile.gettempdir()) / f"verl_search_cache_{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status, fault = folder.lstat(), ""
    if not stat.S_ISDIR(status.st_mode):
        fault = "is a link or a file, expected a folder of yours; move it away"
    elif status.st_uid != os.getuid():
        fault = f"is not yours but user {status.st_uid}'s; set TMPDIR to another place"
    elif status.st_mode & 0o077:
        fault = "is open to other users: look at what it holds, then chmod 700 it or delete it"
    if fault:
        raise ValueError(f"cache_file=node_local: {folder} {fault}")
    return folder
