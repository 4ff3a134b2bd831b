"""Ends a run of which a process has died, and says which one it was.

Upstream waits forever for some of a run's processes, such as those of TransferQueue, and for vLLM's engine core when it
sends weights to it; of others it does not say which one died. The driver looks every two seconds
- at the states of the run's actors, which Ray keeps (`lost_actors`);
- at Ray's own processes, if the run has started them (`lost_ray_processes`);
- for reports of actors about the processes that they have started (`report_engine_deaths`).
A process that is ended on purpose is in none of them, nor is a process of another job of the same cluster.
"""

import atexit
import functools
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import wait as wait_for_sentinels
from types import ModuleType

import ray
from ray._private.worker import global_worker
from ray.core.generated.common_pb2 import ActorDiedErrorContext as DIED
from ray.experimental import internal_kv

LOOK_SECONDS = 2
# from a message to the end of a run that has not ended by itself, which keeps upstream's own exceptions in the log
END_SECONDS = 20
# without these two of its processes Ray cannot go on; its dashboard and its log monitor only show things
RAY_PROCESSES = ("gcs_server", "raylet")
REPORTS = "verl_deaths"


class DeathWatch(threading.Thread):
    """Thread of the driver. A death is printed at once; then the run has `END_SECONDS`, and ends with exit code 4.

    If the driver ends by itself within two looks, the last look is at its exit.
    """

    def __init__(self):
        super().__init__(name="DeathWatch", daemon=True)
        self.died: list[str] = []
        self.ending = threading.Event()
        # runs before Ray's own exit handler, which ends Ray's processes, as `ray` was imported earlier
        atexit.register(self.end)

    def look(self) -> None:
        """Print the deaths that were not printed yet."""
        try:
            lost = lost_ray_processes() or [*lost_actors(), *reported_deaths()]
        except Exception:  # of several kinds: Ray is just ending, or the cluster does not answer
            return
        new = [text for text in lost if text not in self.died]
        self.died += new
        if new:
            print(
                f"error: {', '.join(new)} died, often because memory ran out. The run ends within {END_SECONDS} s; the "
                "same command resumes from the last complete checkpoint",
                file=sys.stderr,
                flush=True,
            )

    def run(self) -> None:
        while not self.died and not self.ending.wait(LOOK_SECONDS):
            self.look()
        if self.died:
            time.sleep(END_SECONDS)
            os._exit(4)

    def end(self) -> None:
        """Look for the last time."""
        if not self.ending.is_set():
            self.look()
            self.ending.set()


def lost_actors() -> list[str]:
    """This job's actors whose process or node has died, each as `class (process, node)`; not those that were ended."""
    if not ray.is_initialized():
        return []
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    dead = ray._private.state.actors(job_id=job, actor_state_name="DEAD").values()
    return [
        f"{actor['ActorClassName'].rsplit('.')[-1]} (process {actor['Pid']} on {actor['Address']['IPAddress']})"
        for actor in dead
        if actor["DeathCause"].HasField("oom_context") or _died(actor["DeathCause"].actor_died_error_context)
    ]


def _died(context: DIED) -> bool:
    """Ray has no reason of its own for an actor that called `exit_actor` or `sys.exit(0)`, only a text."""
    return context.reason in (DIED.WORKER_DIED, DIED.NODE_DIED) and "INTENDED_" not in context.error_message


def lost_ray_processes() -> list[str]:
    """Those of `RAY_PROCESSES` that this driver has started and that have died."""
    node = global_worker.node
    if node is None:
        return []
    return [
        f"Ray's {kind} (process {process.pid} on {node.node_ip_address})"
        for kind, process in node.dead_processes()
        if kind in RAY_PROCESSES
    ]


def reported_deaths() -> list[str]:
    """What `report` was called with in this job's processes."""
    if not ray.is_initialized():
        return []
    job = f"{ray.get_runtime_context().get_job_id()}:"
    return [key.decode().removeprefix(job) for key in internal_kv._internal_kv_list(job, namespace=REPORTS)]


def report(text: str) -> None:
    """Tell the driver of a death, in any process of its job."""
    internal_kv._internal_kv_put(f"{ray.get_runtime_context().get_job_id()}:{text}", b"", namespace=REPORTS)


def report_engine_deaths(server: ModuleType) -> None:
    """Let vLLM's servers report the death of their engine cores.

    verl 0.9.1 notices it at the next request, and never while it sends weights.

    Args:
        server: the module `verl.workers.rollout.vllm_rollout.vllm_async_server`.
    """
    run_server = server.vLLMHttpServer.run_server

    @functools.wraps(run_server)
    async def run_and_watch(self, args):
        await run_server(self, args)
        report_first_death("EngineCore")

    server.vLLMHttpServer.run_server = run_and_watch


def report_first_death(name: str) -> None:
    """Wait in a thread for the death of a child process whose name begins with `name`, and report it."""
    node = ray.util.get_node_ip_address()
    children = [child for child in multiprocessing.active_children() if child.name.startswith(name)]
    names = {child.sentinel: f"vLLM's {child.name} (process {child.pid} on {node})" for child in children}

    def wait() -> None:
        for sentinel in wait_for_sentinels(list(names)):
            report(names[sentinel])

    threading.Thread(target=wait, daemon=True).start()
