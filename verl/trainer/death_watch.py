"""Ends a run after one of its processes has died or reported a fault, and names the process.

Upstream waits forever for some of a run's processes, such as TransferQueue's, and for vLLM's engine core while it
sends weights to it; if another process dies, it does not say which one. The driver looks every two seconds
- at the states of the run's actors, which Ray keeps (`lost_actors`);
- for faults that processes of the run have reported (`verl.utils.fault_reports`), such as the death of a process that
  an actor has started (`verl_patches.engine_deaths`).
Neither source shows processes that were ended on purpose, or processes of another job on the same cluster. Ray ends the
driver when its GCS or raylet is gone; a raylet is named here (`lost_raylet`), as Ray's message does not name it.
"""

import atexit
import os
import re
import sys
import threading
import time
from collections import defaultdict

import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext as DIED

from verl.trainer.progress_watch import give_sign_of_life
from verl.utils.fault_reports import reported_faults

LOOK_SECONDS = 2
# Time from the message to the end of the run; within it, upstream's own exceptions can still reach the log.
END_SECONDS = 20


class DeathWatch(threading.Thread):
    """The driver's thread that prints a fault at once, and ends the run `END_SECONDS` later with exit code 4.

    If the driver ends by itself between two looks, the last look takes place at its exit.

    Args:
        run_dir: folder for the driver's signs of life.
    """

    def __init__(self, run_dir: str | None = None):
        super().__init__(name="DeathWatch", daemon=True)
        self.run_dir = run_dir
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
            print(f"error: {'; '.join(new)}. The run ends within {END_SECONDS} s", file=sys.stderr, flush=True)

    def run(self) -> None:
        while not self.faults and not self.ending.wait(LOOK_SECONDS):
            self.look()
            give_sign_of_life(self.run_dir, "driver", None)
        if self.faults:
            time.sleep(END_SECONDS)
            os._exit(4)

    def end(self) -> None:
        """Look for the last time, at the driver's exit, and stop the thread's looks."""
        if not self.ending.is_set():
            self.look()
            self.ending.set()


def lost_raylet() -> list[str]:
    """Return a clause about the raylet, if this process has started it and it has ended."""
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
