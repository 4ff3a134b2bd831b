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
import time
from pathlib import Path

APPLICATION_ID = 0x53524348  # "SRCH"; it is in the file's header
WAIT = 30.0  # longest wait for other processes' writes, in seconds
TABLE = "CREATE TABLE IF NOT EXISTS cache (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, text TEXT NOT NULL)"
PUT = "INSERT OR REPLACE INTO cache (key, text) VALUES (?, ?)"
USED_BYTES = """
SELECT page_size * (page_count - freelist_count) FROM pragma_page_size, pragma_page_count, pragma_freelist_count"""
DELETE_OLDEST = "DELETE FROM cache WHERE id <= (SELECT min(id) + (max(id) - min(id)) / 10 FROM cache)"


class SearchCache:
    """A cache of search results. Beyond `size_mb` (10^6 bytes) the entries that were written first are deleted. Raise
    ValueError if the file, which is not changed, is damaged or no such cache; the check takes about 3 s per GB."""

    def __init__(self, path: str | Path, *, size_mb: float = 512):
        if not size_mb > 0:
            raise ValueError(f"cache size must be positive, got {size_mb!r} MB")
        self.path = Path(path).expanduser()
        self._limit, self._lock = size_mb * 1e6, threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                # Autocommit mode. Our lock guards the connection, so it is not bound to one thread.
                self._database = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None, check_same_thread=False)
                stack.callback(self._database.close)
                self._prepare()
            except sqlite3.OperationalError as error:
                raise OSError(f"{self.path}: cannot be opened as a search cache: {error}") from error
            except sqlite3.DatabaseError as error:
                fault = f"damaged, or not a search cache ({error})"
                raise ValueError(f"{self.path}: {fault}; move it away to begin a new one") from error
            stack.pop_all()

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

    def _prepare(self) -> None:
        is_new = self._one("PRAGMA schema_version") == 0
        if not is_new and self._one("PRAGMA application_id") != APPLICATION_ID:
            raise sqlite3.DatabaseError("an SQLite file of something else")
        if not is_new and (fault := self._one("PRAGMA quick_check(1)")) != "ok":
            raise sqlite3.DatabaseError(" ".join(fault.split()))
        self._enter_wal_mode()
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:
            if self._one("PRAGMA schema_version") == 0:  # not made by another process meanwhile
                self._database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._database.execute(TABLE)

    def _enter_wal_mode(self) -> None:
        """Enter WAL mode, with retries: SQLite itself does not wait here while another process enters it."""
        end = time.monotonic() + WAIT
        while True:
            try:
                return self._database.execute("PRAGMA journal_mode = WAL").close()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.02)

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
