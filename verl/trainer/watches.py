"""Ends a run that cannot go on, and says why: `RunWatch` in the driver, `ProgressWatch` in the TaskRunner.

Upstream waits without a limit for engines, workers and rewards. If a process dies, it does not say which one, and for
some of them it waits forever. The driver looks every two seconds
- at the states of the run's actors, which Ray keeps (`lost_actors`);
- for faults that processes of the run have reported (`verl.utils.fault_reports`).
Processes that were ended on purpose, and those of other jobs, count nowhere.
"""

import atexit
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext as DIED

from verl.utils.fault_reports import reported_faults

LOOK_SECONDS = 2.0
# Time from the driver's message to the end of the run; within it, upstream's own exceptions can still reach the log.
END_SECONDS = 20.0
# Time from the TaskRunner's message until it ends itself, in case the driver has not ended the run by then.
TASK_RUNNER_SECONDS = 60.0
# The start may take this long under any limit: models are loaded and compiled.
START_SECONDS = 3600.0
FAULT_CODE = 4


# ---- in the driver ----


class RunWatch(threading.Thread):
    """The driver's thread, the one place that ends a run: `END_SECONDS` after a fault, with exit code 4. If the driver
    ends by itself between two looks, it looks once more."""

    def __init__(self):
        super().__init__(name="RunWatch", daemon=True)
        self.faults: list[str] = []
        self.ending = threading.Event()
        # This handler runs before Ray's, which ends Ray's processes, because `ray` was imported earlier.
        atexit.register(self.end)

    def look(self) -> None:
        """Print the faults that have not been printed yet."""
        try:
            faults = lost_actors() + reported_faults()
        except Exception:  # its type varies: Ray is shutting down, or the cluster does not answer
            return
        new = [text for text in faults if text not in self.faults]
        self.faults += new
        if new:
            print(f"error: {'; '.join(new)}. The run ends within {END_SECONDS:.0f} s", file=sys.stderr, flush=True)

    def run(self) -> None:
        while not self.faults and not self.ending.wait(LOOK_SECONDS):
            self.look()
        if self.faults:
            time.sleep(END_SECONDS)
            os._exit(FAULT_CODE)

    def end(self) -> None:
        """Look for the last time, at the driver's exit, and stop the thread's looks."""
        if not self.ending.is_set():
            self.look()
            self.ending.set()


def lost_actors() -> list[str]:
    """Return a clause for each lost actor or node of this job; actors that were ended on purpose are left out."""
    if not ray.is_initialized():
        return []
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    clauses, lost_nodes = [], defaultdict(list)
    for actor in ray._private.state.actors(job_id=job, actor_state_name="DEAD").values():
        cause, node = actor["DeathCause"], actor["Address"]["IPAddress"]
        context = cause.actor_died_error_context
        name = f"{actor['ActorClassName'].rsplit('.')[-1]} (process {actor['Pid']} on {node})"
        # Ray marks an actor that called `exit_actor` or `sys.exit(0)` by a text only, not by a reason.
        died = context.reason == DIED.WORKER_DIED and "INTENDED_" not in context.error_message
        if context.reason == DIED.NODE_DIED:
            lost_nodes[node].append(name)
        elif cause.HasField("oom_context"):
            used = re.search(r"\S+ used / \S+ limit", cause.oom_context.error_message)
            how_much = f" ({used[0]})" if used else ""
            clauses.append(f"{name} was killed by Ray, because the memory of its node ran out{how_much}")
        elif died:
            clauses.append(f"{name} died, often because memory ran out")
    return clauses + [
        f"the node {node} does not answer Ray any more: it has died, or the network between it and the head; with it "
        f"{', '.join(sorted(names))}"
        for node, names in sorted(lost_nodes.items())
    ]


# ---- in the TaskRunner ----


class ProgressWatch(threading.Thread):
    """Thread that ends the run when neither the phase nor the `state` (such as the numbers of finished prompts) has
    changed for longer than `seconds`; single phases may have a longer limit. `report` tells the driver, whose own loop
    blocks meanwhile."""

    def __init__(self, seconds: float, state: Callable[[], Hashable], report: Callable[[str], None]):
        super().__init__(name="ProgressWatch", daemon=True)
        self.seconds, self._state, self._report = seconds, state, report
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
            now, (phase, seconds) = (self._changes, self._state()), self._phases[-1]
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > seconds:
                self._end_run(phase, seconds)

    def _end_run(self, phase: str, seconds: float) -> None:
        message = f"no progress for {seconds:g} s (trainer.progress_timeout) in the phase: {phase}"
        end = threading.Timer(TASK_RUNNER_SECONDS, os._exit, [FAULT_CODE])  # the report may hang, too
        end.start()
        print(f"error: {message}", file=sys.stderr, flush=True)
        try:
            self._report(message)
        except Exception as error:  # such as an error of Ray, if Ray itself hangs
            print(f"error: {message}; the driver was not told: {error!r}", file=sys.stderr, flush=True)
        end.join()
