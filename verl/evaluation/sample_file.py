"""The samples of an evaluation, one JSON object on each line: a killed run loses none and goes on where it stopped.

{"settings": {...}}                                   what was asked, and how: another evaluation needs another file
{"question": "7", "sample": 0, "score": 1.0, …}       in the order in which they came
"""

import fcntl
import json
import os
from pathlib import Path


class SampleFile:
    """Open for one evaluation at a time; use it as a context manager.

    Args:
        path: of the file; its folder is made.
        settings: all that the samples depend on, in JSON's types.

    Raises:
        ValueError: the file is another evaluation's, or damaged before its last line; names what differs.
        BlockingIOError: another process writes to it.
    """

    def __init__(self, path: Path, settings: dict):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rows: dict[tuple[str, int], dict] = {}
            self._read(json.loads(json.dumps(settings)))
        except BaseException:
            self._file.close()
            raise

    def _read(self, settings: dict) -> None:
        self._file.seek(0)
        whole, _, torn = self._file.read().rpartition(b"\n")
        if torn:  # the writer was killed inside a line
            self._file.truncate(len(whole) + (1 if whole else 0))
        lines = whole.split(b"\n") if whole else []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if number > 1:
                    self.rows[row["question"], row["sample"]] = row
                else:
                    self._check_settings(row["settings"], settings)
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: not a sample of an evaluation ({error!r})") from error
        if not lines:
            self._write({"settings": settings})

    def _check_settings(self, found: dict, settings: dict) -> None:
        different = [key for key in {*found, *settings} if found.get(key) != settings.get(key)]
        if different:
            parts = [f"{key}={found.get(key)!r} there, {settings.get(key)!r} now" for key in sorted(different)]
            raise ValueError(
                f"{self.path} holds samples of another evaluation ({'; '.join(parts)}): move it away, or choose "
                "another output_dir"
            )

    def add(self, row: dict) -> None:
        """Keep a sample; it is on the disk when this returns."""
        self.rows[row["question"], row["sample"]] = row
        self._write(row)

    def _write(self, row: dict) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> "SampleFile":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
