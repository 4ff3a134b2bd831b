"""Ends a run that makes no progress, with the phase in which it hangs and what it waits for.

Upstream waits without a limit for engines, workers and rewards. The watch is a thread of the TaskRunner, because the
driver's own loop blocks while it waits.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

LOOK_SECONDS = 2.0
# from the message to the end of this process, if the driver, which ends the run, does not end it
END_SECONDS = 60.0


class ProgressWatch(threading.Thread):
    """Thread that ends the run when neither the phase nor the state has changed for a time.

    Args:
        seconds: `trainer.progress_timeout`.
        state: returns what changes while a phase makes progress, such as the numbers of finished prompts.
        describe: returns what the current phase waits for, as a text.
        report: tells the driver the message; the driver ends the run.
    """

    def __init__(
        self,
        seconds: float,
        state: Callable[[], Hashable],
        describe: Callable[[], str],
        report: Callable[[str], None],
    ):
        super().__init__(name="ProgressWatch", daemon=True)
        self.seconds, self._state, self._describe, self._report = seconds, state, describe, report
        self._phases: list[str] = []
        self._changes = 0
        # where the first exception that left a phase was raised
        self.failed_in: str | None = None
        self._ended = threading.Event()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the calling thread's work while the block runs; a phase within it takes its place."""
        self._phases.append(name)
        self._changes += 1
        try:
            yield
        except Exception:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self._phases.pop()
            self._changes += 1

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def run(self) -> None:
        seen, since = None, time.monotonic()
        while not self._ended.wait(min(LOOK_SECONDS, self.seconds / 4)):
            now = self._changes, self._state()
            if now != seen:
                seen, since = now, time.monotonic()
            elif self._phases and time.monotonic() - since > self.seconds:
                self._end_run(self._phases[-1])
                return

    def _end_run(self, phase: str) -> None:
        message = (
            f"no progress for {self.seconds:g} s (trainer.progress_timeout) in the phase: {phase}{self._describe()}"
        )
        print(f"error: {message}", file=sys.stderr, flush=True)
        self._report(message)
        time.sleep(END_SECONDS)
        os._exit(4)
