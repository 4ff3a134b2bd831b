"""Keeps the samples of an evaluation in a file, so that a killed run loses none and continues where it stopped.

    {"settings": {...}}                                 first line: the settings on which the samples depend
    {"question": "7", "sample": 0, "score": 1.0, …}     then a line for each sample, in the order of arrival

An evaluation with other settings needs another file.
"""

import fcntl
import json
import os
from pathlib import Path


class SampleFile:
    """A context manager for the file, which only one evaluation can open at a time. `rows` holds its samples by
    question id and sample number. A last line that a killed run left incomplete is removed."""

    def __init__(self, path: Path, settings: dict):
        self.path = path
        self.rows: dict[tuple[str, int], dict] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(json.loads(json.dumps(settings)))
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ValueError(f"{path}: another evaluation is writing to it") from error
            raise

    def _read(self, settings: dict) -> None:
        self._file.seek(0)
        whole, newline, torn = self._file.read().rpartition(b"\n")
        if torn:  # The writer was killed within a line.
            self._file.truncate(len(whole + newline))
        lines = whole.splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if number > 1:
                    self.rows[row["question"], row["sample"]] = row
                elif len(lines) > 1:
                    self._check_settings(row["settings"], settings)
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: not a sample of an evaluation ({error!r})") from error
        if len(lines) <= 1:  # An evaluation that ended before its first sample binds no later one to its settings.
            self._file.truncate(0)
            self._write({"settings": settings})

    def _check_settings(self, earlier: dict, settings: dict) -> None:
        different = sorted(key for key in {*earlier, *settings} if earlier.get(key) != settings.get(key))
        if different:
            parts = [f"{key}={earlier.get(key)!r} there, {settings.get(key)!r} now" for key in different]
            raise ValueError(
                f"{self.path} holds samples of another evaluation ({'; '.join(parts)}): move it away, or choose "
                "another output_dir"
            )

    def add(self, row: dict) -> None:
        """Add a sample; it is on the disk when this returns."""
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
