"""Updates that leave NaN or infinity in the weights, on upstream's engine."""

import math

import pytest
import torch
from verl.workers.engine.base import BaseEngine


class Engine(BaseEngine):
    """An engine whose update sets one weight."""

    def __init__(self, module, value: float):
        self.module, self.value = module, value

    def optimizer_zero_grad(self):
        pass

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        return {"metrics": {}}

    def optimizer_step(self) -> float:
        modules = self.module if isinstance(self.module, list) else [self.module]
        weight = list(modules[-1].parameters())[-1]
        getattr(weight, "_local_tensor", weight).data.view(-1)[-1] = self.value
        return 1.0

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_spoils_a_weight_raises(sharded, value):
    """Though its gradients' norm is finite."""
    with pytest.raises(FloatingPointError, match="not finite after an update, the first of them weight"):
        Engine(sharded, value).train_batch({}, None)


def test_other_updates_return_their_metrics(sharded):
    """Also the largest numbers of bfloat16, weights without elements, and frozen weights, which no update changes."""
    parts = [torch.nn.Linear(2, 2).bfloat16(), torch.nn.Linear(0, 1, bias=False), torch.nn.Linear(2, 1)]
    parts[0].weight.data.fill_(torch.finfo(torch.bfloat16).max)
    parts[1].requires_grad_(False)
    parts[1].weight = torch.nn.Parameter(torch.full((1, 1), math.nan), requires_grad=False)
    for module in (sharded, parts, torch.nn.Sequential(*parts)):
        assert Engine(module, 2.0).train_batch({}, None) == {"metrics": {"grad_norm": 1.0}}
    with pytest.raises(FloatingPointError, match="the first of them bias"):
        Engine(parts, math.nan).train_batch({}, None)
