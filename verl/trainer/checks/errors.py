"""The error with which the checks before a run end it."""

from collections.abc import Iterator
from contextlib import contextmanager


class PreflightError(ValueError):
    """The run cannot succeed; the message names the key and says what to do."""


@contextmanager
def named_errors() -> Iterator[None]:
    """Turn a ValueError, whose message names the key, into a PreflightError."""
    try:
        yield
    except ValueError as error:
        raise PreflightError(str(error)) from error
