"""Lets a run go on when a line of its metrics cannot be written, as on a full disk.

verl 0.9.1 ends the training with the error, or cuts a line in two. What the file logger could not write follows once
there is room. This can go when upstream's loggers handle OSError.
"""

import functools
import io
import logging
from types import ModuleType

logger = logging.getLogger(__name__)

BUFFER_BYTES = 16 * 2**20


def go_on_without_metrics(tracking: ModuleType) -> None:
    """Let the file logger and TensorBoard's warn about an OSError instead of raising it."""
    file_logger = tracking.FileLogger
    start = file_logger.__init__

    @functools.wraps(start)
    def init(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.fp = io.BufferedWriter(self.fp, BUFFER_BYTES)  # keeps what the file does not take

    file_logger.__init__ = init
    for tracker in (file_logger, tracking._TensorboardAdapter):
        tracker.log, tracker.finish = warning(tracker.log), warning(tracker.finish)


def warning(method):
    """Return a logger's method that also flushes its file, if it has one, and warns about an OSError."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            method(self, *args, **kwargs)
            if (file := getattr(self, "fp", None)) and not file.closed:
                file.flush()
        except OSError as error:
            logger.warning(f"metrics were not written, and the run goes on: {error}")

    return call
