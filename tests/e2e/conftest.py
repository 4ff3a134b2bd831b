"""What the end-to-end tests train: a folder of data and a model."""

from pathlib import Path

import pytest

from recipe.common.countdown import CountdownConfig, write_countdown
from recipe.common.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with data and an untrained model; runs go below it."""
    folder = tmp_path_factory.mktemp("inputs")
    write_countdown(folder, CountdownConfig(train_size=64, test_size=4, demo_size=0))
    write_tiny_model(folder / "model")
    return folder
