"""Lets a run go on when a line of its metrics cannot be written, as on a full disk.

verl 0.9.1 ends the training with the error, or cuts a line in two. What the file logger could not write follows once
there is room. This can go when upstream's loggers handle OSError.
"""

import functools
import io
import logging
from collections.abc import Callable
from types import ModuleType

logger = logging.getLogger(__name__)

BUFFER_BYTES = 16 * 2**20


def go_on_without_metrics(tracking: ModuleType) -> None:
    """Let the file logger and TensorBoard's warn about an OSError instead of raising it."""
    for tracker in (tracking.FileLogger, tracking._TensorboardAdapter):
        tracker.log, tracker.finish = warning(tracker.log), warning(tracker.finish)


def warning(method: Callable) -> Callable:
    """Return a logger's method that warns about an OSError; a file keeps in memory what the disk does not take."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            if isinstance(file := getattr(self, "fp", None), io.RawIOBase):
                file = self.fp = io.BufferedWriter(file, BUFFER_BYTES)
            method(self, *args, **kwargs)
            if file is not None and not file.closed:
                file.flush()
        except OSError as error:
            logger.warning(f"metrics were not written, and the run goes on: {error}")

    return call
