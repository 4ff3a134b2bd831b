"""Watches a started run for placement groups and actors that Ray does not place.

Upstream would wait for them forever without a message. The thread that runs `watch_pending_actors` says what is missing
and ends the driver after `trainer.pending_seconds`. It looks only at this run: other jobs may use the same cluster.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping

import ray
from omegaconf import DictConfig
from ray.util.placement_group import placement_group_table

# Limit for a cluster that cannot grow (Ray's own limit for the start of a worker process is 60 s), and for one that may
# grow by an autoscaler, or by a user with `ray start`.
PENDING_SECONDS, GROWING_SECONDS = 60, 900
# Time between two looks at the cluster, and between two messages.
LOOK_SECONDS, SAY_SECONDS = 2, 60


def unplaced(groups: Mapping[str, dict], actors: Mapping[str, dict], job: str) -> str | None:
    """Return a text about what a job waits for; None if Ray has placed everything.

    Args:
        groups: Ray's placement groups, as `placement_group_table` returns them.
        actors: the job's pending actors, as Ray's state lists them; an actor with an address is already placed.
        job: the job's id as hex digits; the ids of its placement groups end with it.
    """
    waiting = [group for name, group in sorted(groups.items()) if name.endswith(job) and group["state"] == "PENDING"]
    parts = [_amounts(group) for group in waiting]
    unplaced_actors = [actor for actor in actors.values() if not actor["Address"]["IPAddress"]]
    classes = Counter(actor["ActorClassName"].rsplit(".")[-1] for actor in unplaced_actors)
    parts += [f"{number} {name}" for name, number in sorted(classes.items())]
    return ", ".join(parts) or None


def _amounts(group: dict) -> str:
    whole = sum((Counter(bundle) for bundle in group["bundles"].values()), Counter())
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in sorted(whole.items()))
    return f"{amounts} on one node" if group["strategy"].startswith("STRICT_PACK") else amounts


def wait_too_long(look: Callable[[], str | None], limit: float, patient: bool, clock) -> str:
    """Look every two seconds until something has been missing without a break for longer than the limit; return a text
    about it.

    Args:
        look: function that returns what is missing now.
        limit: longest wait in seconds.
        patient: whether to print what is missing during the wait: after two looks in a row, then every minute.
        clock: object with the functions `sleep` and `monotonic` of the module `time`.
    """
    since = None
    while True:
        clock.sleep(LOOK_SECONDS)
        missing, now = look(), clock.monotonic()
        if missing is None:
            since = None
            continue
        if since is None:
            since, say_at = now, now + LOOK_SECONDS
        if now - since > limit:
            return f"Ray has not placed {missing} for {now - since:.0f} s"
        if patient and now >= say_at:
            say_at = now + SAY_SECONDS
            print(
                f"waiting for {missing}, which Ray has not placed; the run ends when it has waited {limit:.0f} s "
                f"(trainer.pending_seconds), {now - since:.0f} s are over",
                flush=True,
            )


def seconds_allowed(config: DictConfig, joined: bool) -> float:
    """Return the longest wait in seconds: `trainer.pending_seconds`, or if it is null `GROWING_SECONDS` for a cluster
    that the run has joined (see `watch_pending_actors`), and `PENDING_SECONDS` for one that it has started."""
    if config.trainer.get("pending_seconds") is not None:
        return config.trainer.pending_seconds
    return GROWING_SECONDS if joined else PENDING_SECONDS


def watch_pending_actors(config: DictConfig, joined: bool, needed_cpus: int) -> None:
    """End the driver with exit code 3 when the run has waited too long for resources that the cluster lacks.

    Args:
        joined: whether the cluster was started before the run, so that nodes may join it.
        needed_cpus: number of Ray's logical CPUs that the run holds at once.
    """
    waited = wait_too_long(_look, seconds_allowed(config, joined), joined, time)
    more_cpus = f"raise ray_kwargs.ray_init.num_cpus (now {config.ray_kwargs.ray_init.get('num_cpus')})"
    if joined:
        start = "start them with more (ray start --num-cpus)"
        more_cpus = f"add nodes to the cluster, or {start}, or wait longer (trainer.pending_seconds)"
    from verl.workers.config.schedule import rollout_workers  # this module is imported while verl itself is imported

    own = "actor_rollout_ref.rollout.n_gpus_per_node, " if rollout_workers(config) else ""
    print(
        f"error: {waited}; free in the cluster: {_free_resources()}. The run needs {needed_cpus} CPUs: {more_cpus}, or "
        f"lower trainer.n_gpus_per_node, {own}or transfer_queue.backend.SimpleStorage.num_data_storage_units",
        file=sys.stderr,
        flush=True,
    )
    os._exit(3)


def _look() -> str | None:
    """Return what this driver's job lacks now; None before it is connected, and when the cluster does not answer."""
    if not ray.is_initialized():
        return None
    job = ray.get_runtime_context().get_job_id()
    try:
        pending = ray._private.state.actors(job_id=ray.JobID.from_hex(job), actor_state_name="PENDING_CREATION")
        return unplaced(placement_group_table(), pending, job)
    except ray.exceptions.RaySystemError:
        return None


def _free_resources() -> str:
    free, whole = ray.available_resources(), ray.cluster_resources()
    return ", ".join(f"{free.get(name, 0):g} of {whole.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
