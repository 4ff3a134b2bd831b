"""A run that joins a Ray cluster too small for it says so."""

import pytest

from tests.e2e.runs import NO_TOKEN, imports_made, ray_cluster, start_run

pytestmark = pytest.mark.e2e


@pytest.fixture
def small_cluster():
    with ray_cluster(nodes=1, cpus=12, environment=imports_made()) as address:
        yield address


def test_missing_gpus_are_counted_at_the_start(inputs, small_cluster):
    launcher = start_run(inputs, "cluster", "trainer.n_gpus_per_node=2", RAY_ADDRESS=small_cluster, **NO_TOKEN)
    _, errors = launcher.communicate(timeout=180)
    assert launcher.returncode == 1
    assert "Total available GPUs 1.0 is less than total desired GPUs 2" in errors
