"""Watches a started run for actors that Ray cannot place.

Upstream would wait for them forever without a message. The thread that runs `watch_pending_actors` says what is missing
and ends the driver after `trainer.pending_seconds`. It looks only at this run: other jobs may use the same cluster.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import ray
from omegaconf import DictConfig
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus

# limits for a cluster that cannot grow, and for one to which an autoscaler or a user with `ray start` may add nodes
PENDING_SECONDS, GROWING_SECONDS = 15, 900
# between two looks at the cluster, and between two messages
LOOK_SECONDS, SAY_SECONDS = 2, 60

Amounts = Counter  # of Ray's resources, such as {"GPU": 8, "CPU": 24}


@dataclass(frozen=True)
class Missing:
    """Resources that the run waits for."""

    text: str
    hopeless: bool = False  # no node has as much, and Ray's autoscaler reports that none of its node types has


@dataclass(frozen=True)
class Demand:
    """Resources that Ray has not placed yet: either all bundles are placed or none."""

    bundles: list[Amounts]
    on_one_node: bool = True
    # the autoscaler can add no node for them; it also says so while other jobs hold all nodes that it may have
    infeasible: bool = False

    def fits(self, nodes: list[Amounts]) -> bool:
        """Whether nodes with these amounts can hold it; without `on_one_node` this is only a necessary condition."""
        whole = sum(self.bundles, Counter())
        if self.on_one_node:
            return any(whole <= node for node in nodes)
        return whole <= sum(nodes, Counter()) and all(any(bundle <= node for node in nodes) for bundle in self.bundles)

    def __str__(self) -> str:
        whole = sum(self.bundles, Counter())
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in sorted(whole.items()))
        return f"{amounts} on one node" if self.on_one_node else amounts


def missing_in(reply: GetClusterStatusReply, job: str, has_pending_actors: bool) -> Missing | None:
    """The first demand of a job for which the cluster has not enough free resources; None if there is none.

    Args:
        job: the job's id, as hex digits.
        has_pending_actors: whether the job has pending actors, as Ray does not say to which job the actors belong that
            it cannot place.
    """
    nodes = [node for node in reply.cluster_resource_state.node_states if node.status != NodeStatus.DEAD]
    free = [Counter(dict(node.available_resources)) for node in nodes]
    total = [Counter(dict(node.total_resources)) for node in nodes]
    for demand in _demands(reply, job, has_pending_actors):
        if not demand.fits(free):
            if demand.infeasible and not demand.fits(total):
                return Missing(f"{demand} (no node and no node type of the autoscaler has as much)", hopeless=True)
            return Missing(str(demand))
    return None


def _demands(reply: GetClusterStatusReply, job: str, has_pending_actors: bool) -> Iterator[Demand]:
    state, scaling = reply.cluster_resource_state, reply.autoscaling_state
    infeasible_groups = {group.details for group in scaling.infeasible_gang_resource_requests}
    for group in state.pending_gang_resource_requests:
        placement_group, _, strategy = group.details.partition(":")  # as in 2f…01000000:STRICT_PACK|PENDING
        if placement_group.endswith(job):
            bundles = [Counter(dict(request.resources_bundle)) for request in group.requests]
            yield Demand(bundles, strategy.startswith("STRICT_PACK"), group.details in infeasible_groups)
    if has_pending_actors:
        infeasible = [dict(request.resources_bundle) for request in scaling.infeasible_resource_requests]
        for pending in state.pending_resource_requests:
            amounts = dict(pending.request.resources_bundle)
            yield Demand([Counter(amounts)], infeasible=amounts in infeasible)


def wait_too_long(look: Callable[[], Missing | None], limit: Callable[[Missing], float], patient: bool, clock) -> str:
    """Wait until resources have been missing at every look for longer than `limit` allows.

    Args:
        look: returns what is missing now.
        limit: the most seconds to wait for it.
        patient: print what the run waits for, when it is missing at two looks in a row and then every minute.
        clock: has `sleep` and `monotonic`, as the module `time`.

    Returns:
        A text that says what was missing and for how long.
    """
    since = None
    while True:
        clock.sleep(LOOK_SECONDS)
        missing = look()
        if missing is None:
            since = None
            continue
        if since is None:
            since = clock.monotonic()
            say_at = since + LOOK_SECONDS
        now = clock.monotonic()
        if now - since > limit(missing):
            return f"Ray has waited {now - since:.0f} s for {missing.text}, more than the cluster has free"
        if patient and now >= say_at:
            say_at = now + SAY_SECONDS
            print(
                f"waiting for {missing.text}, more than the cluster has free; the run ends when it has waited "
                f"{limit(missing):.0f} s (trainer.pending_seconds), {now - since:.0f} s are over",
                flush=True,
            )


def seconds_allowed(config: DictConfig, joined: bool, missing: Missing) -> float:
    """`trainer.pending_seconds`; if it is null, more for a cluster that may still grow than for others."""
    if config.trainer.get("pending_seconds") is not None:
        return config.trainer.pending_seconds
    return GROWING_SECONDS if joined and not missing.hopeless else PENDING_SECONDS


def watch_pending_actors(config: DictConfig, joined: bool, needed_cpus: int) -> None:
    """End the driver with exit code 3 when the run has waited too long for resources that the cluster lacks.

    Args:
        joined: whether the cluster was started before the run, so that nodes may join it.
        needed_cpus: the number of Ray's logical CPUs that the run holds at once.
    """
    waited = wait_too_long(_look, lambda missing: seconds_allowed(config, joined, missing), joined, time)
    more_cpus = f"raise ray_kwargs.ray_init.num_cpus (now {config.ray_kwargs.ray_init.get('num_cpus')})"
    if joined:
        more_cpus = "add nodes to the cluster, or start them with more (ray start --num-cpus), or wait longer "
        more_cpus += "(trainer.pending_seconds)"
    from verl.workers.config.schedule import rollout_workers  # this module is imported in the middle of verl's import

    own = "actor_rollout_ref.rollout.n_gpus_per_node, " if rollout_workers(config) else ""
    print(
        f"error: {waited}; upstream would wait forever. The run needs {needed_cpus} CPUs: {more_cpus}, or lower "
        f"trainer.n_gpus_per_node, {own}or transfer_queue.backend.SimpleStorage.num_data_storage_units",
        file=sys.stderr,
        flush=True,
    )
    os._exit(3)


def _look() -> Missing | None:
    """What this driver's job lacks now; None before it is connected, and when the cluster does not answer."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    try:
        status = GcsClient(context.gcs_address).get_cluster_status(timeout_s=10)
    except ray.exceptions.RpcError:
        return None
    job = context.get_job_id()
    pending = ray._private.state.actors(job_id=ray.JobID.from_hex(job), actor_state_name="PENDING_CREATION")
    return missing_in(GetClusterStatusReply.FromString(status), job, bool(pending))


def leave_missing_gpus_to_the_watch(base: ModuleType) -> None:
    """Remove upstream's count of the cluster's GPUs, so that an autoscaler can start nodes for the run.

    verl 0.9.1 counts the GPUs before it asks for any, and raises if there are too few; but an autoscaler starts nodes
    only for resources that were asked for. `watch_pending_actors` limits how long the run waits for them.

    Args:
        base: the module `verl.single_controller.ray.base`.
    """
    base.ResourcePoolManager._check_resource_available = lambda self: None
