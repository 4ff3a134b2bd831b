"""Every registered task keeps what tests/conformance/tasks.py asks of tasks."""

import pytest

from tests.conformance.tasks import *  # noqa: F403
from verl.utils.parts import parts


@pytest.fixture(params=list(parts("task")))
def task(request):
    return request.param
