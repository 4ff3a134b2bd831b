"""Fixtures of the end-to-end tests: a folder with data and a model to train, and a cluster of two nodes."""

from pathlib import Path

import pytest

from recipe.common.tiny_model import write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from tests.e2e.runs import NO_TOKEN, imports_made, ray_cluster


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with data and an untrained model; runs go below it."""
    folder = tmp_path_factory.mktemp("inputs")
    write_countdown(folder, CountdownConfig(train_size=64, test_size=4, demo_size=0))
    write_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def two_nodes():
    """Environment of a run that joins a cluster of two nodes; `trainer.nnodes=2` then puts a worker on each."""
    with ray_cluster(nodes=2, cpus=12, environment=imports_made()) as address:
        yield {"RAY_ADDRESS": address, **NO_TOKEN}
