"""Ends a run that cannot go on, and says why: `RunWatch` in the driver, `ProgressWatch` in the TaskRunner.

Upstream waits without a limit for engines, workers, rewards and for what Ray does not place. If a process dies, it does
not say which one, and for some of them it waits forever. The driver looks every two seconds
- for placement groups and actors of this job that Ray has not placed (`PlacementWait`);
- at the states of the run's actors, which Ray keeps (`lost_actors`), and at its own raylet;
- for faults that processes of the run have reported (`verl.utils.fault_reports`).
Processes that were ended on purpose, and those of other jobs, count nowhere.
"""

import atexit
import os
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext as DIED
from ray.util.placement_group import placement_group_table

from verl.utils.fault_reports import reported_faults

LOOK_SECONDS = 2.0
SAY_SECONDS = 60  # between two messages about what is not placed
# Time from the driver's message to the end of the run; within it, upstream's own exceptions can still reach the log.
END_SECONDS = 20.0
# Time from the TaskRunner's message until it ends itself, in case the driver has not ended the run by then.
TASK_RUNNER_SECONDS = 60.0
# The start may take this long under any limit: models are loaded and compiled, and nodes may have to join.
START_SECONDS = 3600.0
PENDING_CODE, FAULT_CODE = 3, 4


# ---- in the driver ----


class PlacementWait:
    """The wait for what Ray has not placed: `limit` in seconds, and `advice` for the message at its end. With `says_so`
    it prints what is missing: at the second look in a row, then every minute."""

    def __init__(self, limit: float, says_so: bool, advice: str):
        self.limit, self.says_so, self.advice = limit, says_so, advice
        self.since: float | None = None
        self.say_at = 0.0

    def too_long(self, missing: str | None, now: float) -> str | None:
        """Return a text if something has been missing without a break for longer than the limit."""
        if missing is None:
            self.since = None
            return None
        if self.since is None:
            self.since, self.say_at = now, now + LOOK_SECONDS
        waited = now - self.since
        if waited > self.limit:
            return f"Ray has not placed {missing} for {waited:.0f} s"
        if self.says_so and now >= self.say_at:
            self.say_at = now + SAY_SECONDS
            print(
                f"waiting for {missing}, which Ray has not placed; the run ends when it has waited {self.limit:.0f} s "
                f"(trainer.pending_seconds), {waited:.0f} s are over",
                flush=True,
            )
        return None


class RunWatch(threading.Thread):
    """The driver's thread, the one place that ends a run: with exit code 3 for what Ray does not place, and after any
    other fault `END_SECONDS` later with 4. If the driver ends by itself between two looks, it looks once more."""

    def __init__(self, placement: PlacementWait | None = None):
        super().__init__(name="RunWatch", daemon=True)
        self.placement = placement
        self.faults: list[str] = []
        self.ending = threading.Event()
        # This handler runs before Ray's, which ends Ray's processes, because `ray` was imported earlier.
        atexit.register(self.end)

    def look(self) -> None:
        """Print the faults that have not been printed yet."""
        try:
            faults = lost_raylet() + lost_actors() + reported_faults()
        except Exception:  # its type varies: Ray is shutting down, or the cluster does not answer
            return
        new = [text for text in faults if text not in self.faults]
        self.faults += new
        if new:
            print(f"error: {'; '.join(new)}. The run ends within {END_SECONDS:.0f} s", file=sys.stderr, flush=True)

    def run(self) -> None:
        code, seconds = FAULT_CODE, END_SECONDS
        while not self.faults and not self.ending.wait(LOOK_SECONDS):
            if self.placement and (late := self.placement.too_long(not_placed(), time.monotonic())):
                print(
                    f"error: {late}; free in the cluster: {free_resources()}. {self.placement.advice}",
                    file=sys.stderr,
                    flush=True,
                )
                self.faults, code, seconds = [late], PENDING_CODE, 0.0
                break
            self.look()
        if self.faults:
            time.sleep(seconds)
            os._exit(code)

    def end(self) -> None:
        """Look for the last time, at the driver's exit, and stop the thread's looks."""
        if not self.ending.is_set():
            self.look()
            self.ending.set()


def not_placed() -> str | None:
    """Return a text about what this driver's job waits for; None if Ray has placed everything or does not answer."""
    if not ray.is_initialized():
        return None
    job = ray.get_runtime_context().get_job_id()
    try:
        pending = ray._private.state.actors(job_id=ray.JobID.from_hex(job), actor_state_name="PENDING_CREATION")
        return unplaced(placement_group_table(), pending, job)
    except ray.exceptions.RaySystemError:
        return None


def unplaced(groups: Mapping[str, dict], actors: Mapping[str, dict], job: str) -> str | None:
    """Return a text about the placement groups (of `placement_group_table`, whose ids end with their job's) and pending
    actors (those without an address in Ray's state) of a job that have no place; None if all have one."""
    waiting = [group for name, group in sorted(groups.items()) if name.endswith(job) and group["state"] == "PENDING"]
    homeless = (actor for actor in actors.values() if not actor["Address"]["IPAddress"])
    classes = Counter(actor["ActorClassName"].rsplit(".")[-1] for actor in homeless)
    return (
        ", ".join([*map(_amounts, waiting), *(f"{number} {name}" for name, number in sorted(classes.items()))]) or None
    )


def _amounts(group: dict) -> str:
    whole = sum((Counter(bundle) for bundle in group["bundles"].values()), Counter())
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in sorted(whole.items()))
    return f"{amounts} on one node" if group["strategy"].startswith("STRICT_PACK") else amounts


def free_resources() -> str:
    """Return the cluster's free CPUs and GPUs for a message."""
    free, whole = ray.available_resources(), ray.cluster_resources()
    return ", ".join(f"{free.get(name, 0):g} of {whole.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def lost_raylet() -> list[str]:
    """Return a clause about the raylet, which Ray's own message does not name, if this process has started it and it
    has ended."""
    node = ray._private.worker.global_worker.node if ray.is_initialized() else None
    raylets = [started.process for started in (node.all_processes.get("raylet", []) if node else [])]
    ended = [f"process {raylet.pid} on {node.node_ip_address}" for raylet in raylets if raylet.poll() is not None]
    return [f"Ray's raylet ({process}) died, often because memory ran out" for process in ended]


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
