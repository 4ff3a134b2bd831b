"""The model of schedules where its numbers can be told by hand."""

import random
from dataclasses import replace

import pytest

from studies.schedule_model import Group, Workload, simulate

EQUAL = Workload(batch=4, trajectories=2, calls=1, writing=2.0, median=3.0, sigma=0.0, update=5.0)


def test_without_a_tail_nothing_but_the_update_can_be_hidden():
    """A group takes 2 + 3 + 2 seconds."""
    assert simulate(EQUAL, "sync").seconds == pytest.approx(7 + 5)
    assert simulate(EQUAL, "sync").staleness == 0
    # the update of 5 / 0.5 seconds is longer than a group
    assert simulate(EQUAL, "separate_async").seconds == pytest.approx(10)
    # two batches are under way at once, of which one is always done: every second step waits for nothing
    assert simulate(EQUAL, "colocate_async").seconds == pytest.approx((7 + 5 + 5) / 2, abs=0.1)


def test_calls_go_on_in_a_pause_and_writing_does_not():
    group = Group(EQUAL, 0, random.Random(0))
    group.advance(1.0, writes=False)
    assert group.seconds == pytest.approx(7), "it begins with writing"
    group.advance(2.5, writes=True)
    group.advance(100.0, writes=False)
    assert group.seconds == pytest.approx(2.0), "the call has ended, and the last writing waits"
    group.advance(2.0, writes=True)
    group.left = [parts for parts in group.left if parts] or [[]]
    assert group.seconds == 0


@pytest.mark.parametrize("schedule", ["colocate_async", "separate_async"])
def test_a_longer_tail_gains_more_and_more_batches_ahead_are_older(schedule):
    def gain(sigma: float) -> float:
        workload = replace(Workload(), sigma=sigma, update=1.0)
        return simulate(workload, "sync", steps=60).seconds / simulate(workload, schedule, steps=60).seconds

    assert 1 < gain(0.3) < gain(1.2)
    one, three = (simulate(Workload(), schedule, ahead=ahead, steps=60) for ahead in (1, 3))
    assert one.staleness < three.staleness and three.seconds <= one.seconds + 0.5


def test_the_same_seed_is_the_same_run():
    assert simulate(Workload(), "colocate_async", steps=20) == simulate(Workload(), "colocate_async", steps=20)
