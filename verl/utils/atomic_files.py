"""Writes files and folders that appear only when complete: under a temporary name beside their own, then renamed."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path for a new file beside `path`. If the block succeeds, the file replaces `path`; else it is removed. A
    reader of `path` sees the old content or the new, never a part. The folder of `path` is created."""
    unfinished = _temporary(Path(path))
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`. If the block succeeds, it is renamed to `path`; else it is removed.

    Raises:
        OSError: `path` is a folder with content when the block has ended; another process may have been faster.
    """
    unfinished = _temporary(Path(path))
    unfinished.mkdir()
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _temporary(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
