"""A fixture that tests of the rollout share."""

import pytest

from recipe.common.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    """A tiny model, which no test changes."""
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))
