"""The watch over resources that a run waits for: whose they are, whether they fit, and how long it waits."""

import inspect
import itertools
import os
import subprocess

import pytest
from omegaconf import OmegaConf
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus

from tests.fresh import python_for
from verl.trainer.cluster_watch import (
    Missing,
    leave_missing_gpus_to_the_watch,
    missing_in,
    seconds_allowed,
    wait_too_long,
)

JOB, OTHER_JOB = "01000000", "02000000"


def cluster(*nodes: tuple[dict, dict], dead: bool = False) -> GetClusterStatusReply:
    """A reply of Ray's about nodes with (free, total) resources."""
    reply = GetClusterStatusReply()
    for free, total in nodes:
        status = NodeStatus.DEAD if dead else NodeStatus.RUNNING
        node = reply.cluster_resource_state.node_states.add(status=status)
        node.available_resources.update(free)
        node.total_resources.update(total)
    return reply


def ask_for_group(reply, bundle: dict, count: int, strategy="STRICT_PACK", job=JOB, infeasible=False):
    details = f"{'ab' * 14}{job}:{strategy}|PENDING"
    groups = [reply.cluster_resource_state.pending_gang_resource_requests]
    groups += [reply.autoscaling_state.infeasible_gang_resource_requests] if infeasible else []
    for group in groups:
        added = group.add(details=details)
        for _ in range(count):
            added.requests.add().resources_bundle.update(bundle)
    return reply


def ask_for_actor(reply, amounts: dict, infeasible=False):
    reply.cluster_resource_state.pending_resource_requests.add(count=1).request.resources_bundle.update(amounts)
    if infeasible:
        reply.autoscaling_state.infeasible_resource_requests.add().resources_bundle.update(amounts)
    return reply


WORKER = {"CPU": 3.0, "GPU": 1.0}
FULL_NODE = {"CPU": 64.0, "GPU": 8.0}


def test_a_group_needs_all_its_bundles_on_one_node():
    two_halves = [({"CPU": 32.0, "GPU": 4.0}, FULL_NODE)] * 2
    reply = ask_for_group(cluster(*two_halves), WORKER, 8)
    assert missing_in(reply, JOB, False) == Missing("24 CPU, 8 GPU on one node")
    spread = ask_for_group(cluster(*two_halves), WORKER, 8, strategy="PACK")
    assert missing_in(spread, JOB, False) is None
    assert missing_in(ask_for_group(cluster(*two_halves), WORKER, 9, strategy="PACK"), JOB, False) is not None
    assert missing_in(ask_for_group(cluster((FULL_NODE, FULL_NODE)), WORKER, 8), JOB, False) is None


def test_dead_nodes_hold_nothing():
    assert missing_in(ask_for_group(cluster((FULL_NODE, FULL_NODE), dead=True), WORKER, 1), JOB, False) is not None


def test_other_jobs_demands_are_not_ours():
    reply = ask_for_group(cluster(({}, FULL_NODE)), WORKER, 8, job=OTHER_JOB)
    assert missing_in(reply, JOB, False) is None
    assert missing_in(reply, OTHER_JOB, False) is not None
    reply = ask_for_actor(cluster(({}, FULL_NODE)), {"CPU": 1.0})
    assert missing_in(reply, JOB, has_pending_actors=False) is None
    assert missing_in(reply, JOB, has_pending_actors=True) == Missing("1 CPU on one node")


@pytest.mark.parametrize(
    ("bundles", "infeasible", "hopeless"),
    [
        (16, True, True),  # no node has 16 GPUs, and the autoscaler knows no type that has
        (16, False, False),  # the autoscaler is starting one, or there is none
        (8, True, False),  # others hold all nodes that the autoscaler may have: they may end
    ],
)
def test_hopeless_is_what_neither_the_nodes_nor_the_autoscaler_could_ever_hold(bundles, infeasible, hopeless):
    reply = ask_for_group(cluster(({"CPU": 2.0}, FULL_NODE)), WORKER, bundles, infeasible=infeasible)
    assert missing_in(reply, JOB, False).hopeless == hopeless


def test_an_actor_larger_than_any_node_is_hopeless():
    reply = ask_for_actor(cluster((FULL_NODE, FULL_NODE)), {"CPU": 100.0}, infeasible=True)
    missing = missing_in(reply, JOB, True)
    assert missing.hopeless and missing.text.startswith("100 CPU on one node (no node and no node type")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


GPUS = Missing("8 GPU")


def test_an_impatient_wait_ends_after_its_limit_without_a_line(capsys):
    clock = Clock()
    error = wait_too_long(lambda: GPUS, lambda _: 15, patient=False, clock=clock)
    # looks at 2, 4, …: missing since the first one, 16 s before the last
    assert clock.now == 1018 and error == "Ray has waited 16 s for 8 GPU, more than the cluster has free"
    assert capsys.readouterr().out == ""


def test_what_is_found_in_between_starts_the_wait_anew():
    clock, looks = Clock(), itertools.chain([GPUS] * 7, [None], itertools.repeat(GPUS))
    wait_too_long(lambda: next(looks), lambda _: 15, patient=False, clock=clock)
    assert clock.now == 1000 + 2 * (7 + 1) + 18


def test_a_patient_wait_speaks_at_once_and_every_minute(capsys):
    clock = Clock()
    wait_too_long(lambda: GPUS, lambda _: 150, patient=True, clock=clock)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(", ", 1)[1] for line in lines] == [f"{second} s are over" for second in (2, 62, 122)]
    assert all("waiting for 8 GPU" in line and "150 s (trainer.pending_seconds)" in line for line in lines)


def test_one_look_that_misses_something_says_nothing(capsys):
    looks = itertools.chain([GPUS, None] * 20, itertools.repeat(GPUS))
    wait_too_long(lambda: next(looks), lambda _: 0, patient=True, clock=Clock())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("setting", "joined", "hopeless", "seconds"),
    [
        (None, False, False, 15),
        (None, True, False, 900),
        (None, True, True, 15),
        (60, True, True, 60),
        (60, False, False, 60),
    ],
)
def test_how_long_a_run_waits(setting, joined, hopeless, seconds):
    config = OmegaConf.create({"trainer": {"pending_seconds": setting}})
    assert seconds_allowed(config, joined, Missing("x", hopeless)) == seconds


@pytest.mark.slow
def test_only_runs_that_are_watched_leave_out_upstreams_count():
    program = "from verl.single_controller.ray import base; print(base.ResourcePoolManager._check_resource_available)"
    for setting, owner in (("1", "leave_missing_gpus_to_the_watch"), ("0", "ResourcePoolManager")):
        environment = {**os.environ, "VERL_WAIT_FOR_NODES": setting}
        ended = subprocess.run(python_for(program), env=environment, capture_output=True, text=True)
        assert f"<function {owner}." in ended.stdout, ended.stderr


def test_upstream_counts_gpus_where_this_takes_the_count_out(monkeypatch):
    from verl.single_controller.ray import base

    manager = base.ResourcePoolManager
    assert "self._check_resource_available()" in inspect.getsource(manager.create_resource_pool)
    assert "raise ValueError" in inspect.getsource(manager._check_resource_available)
    monkeypatch.setattr(manager, "_check_resource_available", manager._check_resource_available)  # put back afterwards
    leave_missing_gpus_to_the_watch(base)
    pools = manager({"global_pool": [8] * 4}, {})
    pools.create_resource_pool()  # no Ray is running: upstream's count would fail
    assert pools.get_n_gpus() == 32
