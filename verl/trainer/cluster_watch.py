"""Watches a started run for what only shows inside the cluster: an actor or a worker group that Ray cannot place.

Upstream waits for it for ever, without a word. The thread started here says what is missing and, after
`trainer.pending_seconds`, ends the driver. Only what this run asks for counts: others may wait in the same cluster.
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

# where nothing can appear any more, and where an autoscaler or somebody with `ray start` may still add nodes
PENDING_SECONDS, GROWING_SECONDS = 15, 900
LOOK_SECONDS, SAY_SECONDS = 2, 60

Amounts = Counter  # of Ray's resources, such as {"GPU": 8, "CPU": 24}


@dataclass(frozen=True)
class Missing:
    """Resources that the run waits for, in words.

    Args:
        hopeless: no node has as much, and Ray's autoscaler reports that none of its node types does.
    """

    text: str
    hopeless: bool = False


@dataclass(frozen=True)
class Demand:
    """Resources that Ray has not placed yet.

    Args:
        bundles: are placed all or none.
        on_one_node: all bundles must go to the same node.
        infeasible: the autoscaler says that it can add no node for them, which it also says while other jobs hold
            all the nodes that it may have.
    """

    bundles: list[Amounts]
    on_one_node: bool = True
    infeasible: bool = False

    def fits(self, nodes: list[Amounts]) -> bool:
        """Whether nodes with these amounts can hold it (without `on_one_node`: a necessary condition)."""
        whole = sum(self.bundles, Counter())
        if self.on_one_node:
            return any(whole <= node for node in nodes)
        return whole <= sum(nodes, Counter()) and all(any(one <= node for node in nodes) for one in self.bundles)

    def __str__(self) -> str:
        whole = sum(self.bundles, Counter())
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in sorted(whole.items()))
        return f"{amounts} on one node" if self.on_one_node else amounts


def missing_in(reply: GetClusterStatusReply, job: str, has_pending_actors: bool) -> Missing | None:
    """What a job waits for and the cluster does not have free; None when that is nothing.

    Args:
        job: the job's id, as hex digits.
        has_pending_actors: whether the job has any; Ray does not say whose the actors are that it cannot place.
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
    """Returns, in words, once something has been missing at every look for as long as `limit` allows.

    Args:
        look: says what is missing now.
        limit: seconds that one may wait for it.
        patient: print what is waited for, when it is missing at two looks in a row and then every minute.
        clock: has `sleep` and `monotonic`, as the module `time`.
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
    """`trainer.pending_seconds`, or by what may still appear in the cluster."""
    if config.trainer.get("pending_seconds") is not None:
        return config.trainer.pending_seconds
    return GROWING_SECONDS if joined and not missing.hopeless else PENDING_SECONDS


def watch_pending_actors(config: DictConfig, joined: bool, needed_cpus: int) -> None:
    """End the driver, with exit code 3, when the run has waited too long for resources that the cluster lacks.

    Args:
        joined: the cluster was there before the run; nodes may join it.
        needed_cpus: Ray's logical CPUs that the run holds at once.
    """
    waited = wait_too_long(_look, lambda missing: seconds_allowed(config, joined, missing), joined, time)
    print(
        f"error: {waited}; upstream would wait for ever. The run needs {needed_cpus} CPUs: "
        f"{_where_to_add_cpus(config, joined)}, or lower trainer.n_gpus_per_node or "
        "transfer_queue.backend.SimpleStorage.num_data_storage_units",
        file=sys.stderr,
        flush=True,
    )
    os._exit(3)


def _where_to_add_cpus(config: DictConfig, joined: bool) -> str:
    if joined:
        return (
            "add nodes to the cluster, or start them with more (ray start --num-cpus), or wait longer "
            "(trainer.pending_seconds)"
        )
    return f"raise ray_kwargs.ray_init.num_cpus (now {config.ray_kwargs.ray_init.get('num_cpus')})"


def _look() -> Missing | None:
    """What this driver's job misses now; None before it is connected, and when the cluster does not answer."""
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
    """verl 0.9.1 counts the cluster's GPUs before it asks for any, and raises when there are fewer; an autoscaler
    starts nodes only for what was asked for. Without the count the run asks, and `watch_pending_actors` sees to it
    that it does not wait for ever.

    Args:
        base: the module `verl.single_controller.ray.base`.
    """
    base.ResourcePoolManager._check_resource_available = lambda self: None
