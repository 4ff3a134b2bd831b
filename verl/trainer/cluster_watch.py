"""Watches a started run for what only shows inside the cluster: an actor that Ray can never place.

Upstream waits for such an actor for ever, without a word; the thread started here ends the driver instead.
"""

import os
import sys
import time

from omegaconf import DictConfig

PENDING_SECONDS = 15


def watch_pending_actors(config: DictConfig, joined: bool, needed_cpus: int) -> None:
    """Stop the driver when something has waited `PENDING_SECONDS` for resources that the cluster does not have."""
    import ray

    waiting_since = None
    while True:
        time.sleep(2)
        if not ray.is_initialized():
            continue
        unplaced = _unplaceable_demand(ray)
        if not unplaced:
            waiting_since = None
            continue
        waiting_since = waiting_since or time.monotonic()
        if time.monotonic() - waiting_since > PENDING_SECONDS:
            print(
                f"error: Ray has waited {PENDING_SECONDS} s for {unplaced}, more than the cluster has free; upstream "
                f"would wait for ever. The run needs {needed_cpus} CPUs: {_where_to_add_cpus(config, joined)}, "
                "or lower trainer.n_gpus_per_node or transfer_queue.backend.SimpleStorage.num_data_storage_units",
                file=sys.stderr,
                flush=True,
            )
            os._exit(3)


def _where_to_add_cpus(config: DictConfig, joined: bool) -> str:
    if joined:
        return "add nodes to the cluster, or start them with more (ray start --num-cpus)"
    return f"raise ray_kwargs.ray_init.num_cpus (now {config.ray_kwargs.ray_init.get('num_cpus')})"


def _unplaceable_demand(ray) -> str | None:
    """Pending requests that exceed the free resources right now, in words; None when there are none."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands
    free = ray.available_resources()
    for demand in [*demands.ray_task_actor_demand, *demands.placement_group_demand]:
        for bundle in demand.bundles_by_count:
            lacking = {name: amount for name, amount in bundle.bundle.items() if amount > free.get(name, 0)}
            if lacking:
                return ", ".join(f"{amount:g} {name}" for name, amount in sorted(lacking.items()))
    return None
