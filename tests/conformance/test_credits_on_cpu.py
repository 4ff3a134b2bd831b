"""Every registered credit keeps what tests/conformance/credits.py asks of credits."""

import math

import numpy as np
import pytest
import torch

from tests.conformance.credits import *  # noqa: F403
from verl.utils.parts import parts
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS


@pytest.fixture(params=[name for name, part in parts("credit").items() if not part.alias])
def credit(request):
    return request.param


def by_node(batch, draw):
    """A number for each prompt's segment, for all of its tokens in all rows."""
    _, prompts = np.unique(batch.index, return_inverse=True)
    keys = torch.from_numpy(prompts).unsqueeze(-1) * 1000 + batch.fields[SEGMENT_IDS.name]
    _, number = keys.unique(return_inverse=True)
    return draw(int(number.max()) + 1)[number]


def gains(batch, generator):
    """A field at the last of the model's tokens before a tool's."""
    drawn = by_node(batch, lambda n: torch.rand(n, generator=generator, dtype=torch.float64) - 0.5)
    ends = (batch.mask == 1) & (batch.mask.roll(-1, -1) == 0) & (batch.fields[SEGMENT_IDS.name].roll(-1, -1) >= 0)
    ends[:, -1] = False
    return torch.where(ends, drawn, math.nan)


@pytest.fixture
def values_of_fields():
    return {
        "local_rewards": lambda batch, generator: by_node(batch, lambda n: torch.rand(n, generator=generator)),
        "draws": lambda batch, generator: by_node(batch, lambda n: torch.randint(1, 4, (n,), generator=generator)),
        "answer_gains": gains,
        "responses": lambda batch, generator: by_node(batch, lambda n: torch.randint(1, 3, (n,), generator=generator)),
        "deep_grpo_pivot": lambda batch, generator: (
            (torch.arange(len(batch.mask)) % 3).unsqueeze(-1) * (batch.fields[SEGMENT_IDS.name] > 2)
        ),
    }
