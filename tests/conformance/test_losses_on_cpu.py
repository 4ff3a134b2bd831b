"""Every registered loss keeps what tests/conformance/losses.py asks of losses."""

import pytest

from tests.conformance.losses import *  # noqa: F403
from verl.utils.parts import parts


@pytest.fixture(params=[name for name, part in parts("loss").items() if not part.alias])
def loss(request):
    return request.param
