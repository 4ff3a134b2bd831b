"""The watch over what Ray does not place for a run: whose it is, and how long the run waits."""

import itertools
import time

import pytest
from omegaconf import OmegaConf

from tests.forked import ray_of_forks
from verl.trainer import cluster_watch
from verl.trainer.cluster_watch import seconds_allowed, unplaced, wait_too_long

JOB, OTHER_JOB = "01000000", "02000000"
WORKER = {"CPU": 3.0, "GPU": 1.0}


def group(count: int, strategy="STRICT_PACK", job=JOB, state="PENDING") -> dict[str, dict]:
    bundles = dict.fromkeys(range(count), WORKER)
    return {f"{'ab' * 14}{job}": {"bundles": bundles, "strategy": strategy, "state": state}}


def test_what_is_not_placed_is_named():
    assert unplaced(group(8), {}, JOB) == "24 CPU, 8 GPU on one node"
    assert unplaced(group(8, strategy="PACK"), {}, JOB) == "24 CPU, 8 GPU"
    assert unplaced(group(8, state="CREATED"), {}, JOB) is None
    assert unplaced(group(8, job=OTHER_JOB), {}, JOB) is None
    placed, waiting = {"IPAddress": "10.0.0.1"}, {"IPAddress": ""}
    names = [("verl.x.RewardLoopWorker", waiting)] * 2 + [("WorkerDict", placed), ("Server", waiting)]
    actors = {f"{i}": {"ActorClassName": name, "Address": address} for i, (name, address) in enumerate(names)}
    assert unplaced(group(1), actors, JOB) == "3 CPU, 1 GPU on one node, 2 RewardLoopWorker, 1 Server"
    assert unplaced({}, {"0": actors["2"]}, JOB) is None


@pytest.mark.slow
def test_a_real_clusters_group_and_actor_are_named():
    import ray
    from ray.util.placement_group import placement_group

    with ray_of_forks(num_cpus=1, object_store_memory=10**8):
        assert cluster_watch._look() is None
        large = ray.remote(num_cpus=2)(Clock)
        kept = large.remote(), placement_group([{"CPU": 2}, {"CPU": 3}], strategy="STRICT_PACK")
        end = time.monotonic() + 30
        while cluster_watch._look() != "5 CPU on one node, 1 Clock" and time.monotonic() < end:
            time.sleep(0.2)
        assert cluster_watch._look() == "5 CPU on one node, 1 Clock", kept
        assert cluster_watch._free_resources() == "1 of 1 CPU, 0 of 0 GPU"


class Clock:
    def __init__(self):
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


GPUS = "8 GPU"


def test_an_impatient_wait_ends_after_its_limit_without_a_line(capsys):
    clock = Clock()
    error = wait_too_long(lambda: GPUS, 15, patient=False, clock=clock)
    # looks at 2, 4, …: missing since the first one, 16 s before the last
    assert clock.now == 1018 and error == "Ray has not placed 8 GPU for 16 s"
    assert capsys.readouterr().out == ""


def test_what_is_found_in_between_starts_the_wait_anew():
    clock, looks = Clock(), itertools.chain([GPUS] * 7, [None], itertools.repeat(GPUS))
    wait_too_long(lambda: next(looks), 15, patient=False, clock=clock)
    assert clock.now == 1000 + 2 * (7 + 1) + 18


def test_a_patient_wait_speaks_at_once_and_every_minute(capsys):
    clock = Clock()
    wait_too_long(lambda: GPUS, 150, patient=True, clock=clock)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(", ", 1)[1] for line in lines] == [f"{second} s are over" for second in (2, 62, 122)]
    assert all("waiting for 8 GPU" in line and "150 s (trainer.pending_seconds)" in line for line in lines)


@pytest.mark.parametrize(
    ("setting", "joined", "seconds"), [(None, False, 60), (None, True, 900), (90, True, 90), (90, False, 90)]
)
def test_how_long_a_run_waits(setting, joined, seconds):
    config = OmegaConf.create({"trainer": {"pending_seconds": setting}})
    assert seconds_allowed(config, joined) == seconds
