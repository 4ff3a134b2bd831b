"""Ends an update after which a weight is NaN or infinite.

verl 0.9.1 looks at gradients alone (`optimizer_step`). Weights that overflow, or that Adam's state makes NaN, are saved
as a complete checkpoint and sent to the engine. This can go when upstream looks at the weights, too.
"""

import functools
from types import ModuleType

import torch


def check_updates(base: ModuleType) -> None:
    """Let `BaseEngine.train_batch` raise FloatingPointError if the trained weights of this rank are not finite."""
    train_batch = base.BaseEngine.train_batch

    @functools.wraps(train_batch)
    def train_and_check(self, *args, **kwargs):
        outputs = train_batch(self, *args, **kwargs)
        if name := weight_that_is_not_finite(self.module):
            raise FloatingPointError(
                f"the weights are not finite after an update, the first of them {name}: lower the learning rate"
            )
        return outputs

    base.BaseEngine.train_batch = train_and_check


def weight_that_is_not_finite(module) -> str | None:
    """Return the name of the first trained weight of a module (or of a list, of pipeline stages) whose local part has
    NaN or infinity; None if all are finite."""
    modules = module if isinstance(module, list | torch.nn.ModuleList) else [module]
    trained = (named for each in modules for named in each.named_parameters() if named[1].requires_grad)
    parts = ((name, getattr(weight, "_local_tensor", weight).detach()) for name, weight in trained)
    # one number for each weight without a copy of it: NaN and infinity are above all others
    largest = [(name, torch.linalg.vector_norm(part, torch.inf)) for name, part in parts if part.numel()]
    return next((name for name, number in largest if not number.isfinite()), None)
