"""A run that joins a Ray cluster too small for it says so; upstream alone would wait forever."""

import time

import pytest

from tests.e2e.runs import NO_TOKEN, imports_made, ray_cluster, start_run, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def small_cluster():
    with ray_cluster(nodes=1, cpus=3, environment=imports_made()) as address:
        yield address


def test_too_few_cpus_are_named_within_30_seconds(inputs, small_cluster):
    launcher = start_run(inputs, "cluster", "trainer.pending_seconds=15", RAY_ADDRESS=small_cluster, **NO_TOKEN)
    log = inputs / "cluster" / "train.log"
    connected = "Connected to Ray cluster"
    wait_until(lambda: log.exists() and connected in log.read_text(), launcher, seconds=120)
    started = time.monotonic()
    _, errors = launcher.communicate(timeout=120)
    seconds = time.monotonic() - started
    assert launcher.returncode == 3
    assert "error: Ray has not placed" in errors and "num_data_storage_units" in errors
    assert "ray start --num-cpus" in errors
    # TaskRunner's own start, about 20 s, comes before the first actor that cannot be placed
    assert seconds < 20 + 30
