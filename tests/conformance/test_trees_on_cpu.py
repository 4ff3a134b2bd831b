"""Every registered tree keeps what tests/conformance/trees.py asks of trees."""

import pytest

from tests.conformance.trees import *  # noqa: F403
from verl.utils.parts import parts


@pytest.fixture(params=[name for name, part in parts("tree").items() if not part.alias])
def tree(request):
    return request.param
