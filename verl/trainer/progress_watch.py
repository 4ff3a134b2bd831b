"""Ends a run that makes no progress, with the phase in which it hangs and what it waits for.

Upstream waits without a limit for engines, workers and rewards. The watch is a thread of the TaskRunner, because the
driver's own loop blocks while it waits. A frozen process cannot watch itself, so TaskRunner and driver also give signs
of life to the launcher (scripts/launch.py).
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_SECONDS = 2.0
# The start may take this long under any limit: models are loaded and compiled, and nodes may have to join.
START_SECONDS = 3600.0
# Time from the message until this process ends itself, in case the driver has not ended the run by then.
END_SECONDS = 60.0
# Bounds of the time without a sign of life after which the launcher ends the run: within them `progress_timeout`.
SILENT_SECONDS = 60.0, 600.0


def give_sign_of_life(run_dir: str | None, name: str, progress_timeout: float | None) -> None:
    """Touch a file in the run's folder; its name holds this process and the limit for the next sign in seconds."""
    low, high = SILENT_SECONDS
    seconds = min(max(progress_timeout or high, low), high)
    if run_dir is not None:
        with suppress(OSError):  # a run whose folder is gone has other messages
            Path(run_dir, f".alive-{name}-{os.getpid()}-{seconds:.0f}").touch()


class ProgressWatch(threading.Thread):
    """Thread that ends the run when neither the phase nor the state has changed for longer than the limit.

    Args:
        seconds: limit in seconds, `trainer.progress_timeout`; single phases may have a longer one.
        state: function that returns a value which changes with progress, such as the numbers of finished prompts.
        describe: function that returns a text about what the current phase waits for.
        report: function that sends the message to the driver, which then ends the run.
        run_dir: folder for the TaskRunner's signs of life.
    """

    def __init__(
        self,
        seconds: float,
        state: Callable[[], Hashable],
        describe: Callable[[], str],
        report: Callable[[str], None],
        run_dir: str | None = None,
    ):
        super().__init__(name="ProgressWatch", daemon=True)
        self.seconds, self._state, self._describe, self._report = seconds, state, describe, report
        self._run_dir = run_dir
        # Name and limit of each open phase, the innermost last; the first entry covers the time outside all others.
        self._phases: list[tuple[str, float]] = [("start or end of the run", max(seconds, START_SECONDS))]
        self._changes = 0
        # Name of the innermost phase in which the first exception was raised.
        self.failed_in: str | None = None

    @contextmanager
    def phase(self, name: str, at_least: float = 0.0) -> Iterator[None]:
        """Name the current phase while the block runs; a phase opened inside the block replaces it meanwhile. The
        phase's limit is the run's, but not below `at_least` seconds."""
        self._phases.append((name, max(self.seconds, at_least)))
        self._changes += 1
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self._phases.pop()
            self._changes += 1

    def run(self) -> None:
        seen, since = None, time.monotonic()
        while True:
            time.sleep(min(LOOK_SECONDS, self.seconds / 4))
            give_sign_of_life(self._run_dir, "TaskRunner", self.seconds)
            now, (phase, seconds) = (self._changes, self._state()), self._phases[-1]
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > seconds:
                self._end_run(phase, seconds)

    def _end_run(self, phase: str, seconds: float) -> None:
        message = f"no progress for {seconds:g} s (trainer.progress_timeout) in the phase: {phase}"
        end = threading.Timer(END_SECONDS, os._exit, [4])  # the report may hang, too
        end.start()
        try:
            message += self._describe()
            print(f"error: {message}", file=sys.stderr, flush=True)
            self._report(message)
        except Exception as error:  # such as an error of Ray, if Ray itself hangs
            print(f"error: {message}; the driver was not told: {error!r}", file=sys.stderr, flush=True)
        end.join()
