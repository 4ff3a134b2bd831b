"""Passes values to losses and estimators beyond the arguments that verl's registered functions have.

Such a function declares a `TokenField`, or a `ContextValue` for a value that is no tensor. The trainer computes a field
once per step over the whole batch, so that no result depends on how the batch is split, and sends it with the rows; the
worker binds it around the loss (`field_losses`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")
FIELDS: dict[str, "TokenField"] = {}


class ContextValue(Generic[T]):
    """A value for a function whose signature verl fixes: `with SETTINGS.bound(value): ...`. `needed_by` and `what` are
    the function and the value in the words of an error for users."""

    def __init__(self, name: str, needed_by: str, what: str):
        self.name, self.needed_by, self.what = name, needed_by, what
        # the value, and the results that `once` has computed within this `bound`: name -> (inputs, result)
        self._held: ContextVar[tuple[T, dict[str, tuple]] | None] = ContextVar(name, default=None)

    @contextmanager
    def bound(self, value: T) -> Iterator[None]:
        token = self._held.set((value, {}))
        try:
            yield
        finally:
            self._held.reset(token)

    def get(self) -> T:
        """Return the bound value; raise RuntimeError if no value is bound."""
        return self._value_and_memo()[0]

    def get_optional(self) -> T | None:
        """Return the bound value; None if no value is bound."""
        return None if (held := self._held.get()) is None else held[0]

    def once(self, name: str, inputs: tuple, compute: Callable[[], Any]) -> Any:
        """Return `compute()`; a later call with equal name and inputs in the same `bound` returns the same result. So
        an estimator and the trainer's metrics share results. `inputs` are everything that the result depends on, except
        the bound value: tensors, arrays or plain objects."""
        memo = self._value_and_memo()[1]
        if name not in memo or not all(map(_equal, memo[name][0], inputs)):
            memo[name] = (inputs, compute())
        return memo[name][1]

    def _value_and_memo(self) -> tuple[T, dict[str, tuple]]:
        if (held := self._held.get()) is None:
            raise RuntimeError(f"{self.needed_by} needs {self.what}, which this trainer does not send")
        return held


def _equal(a, b) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch.equal(a, b)
    return a is b or np.array_equal(a, b)


class TokenField(ContextValue[torch.Tensor]):
    """A (B, T) tensor; `name` is also its key in a batch.

    Args:
        unsent: value of tokens for which the rollout sends none; None for a field that the trainer computes.
        compute: (old policy's entropies (B, T) in nats, mask (B, T)) -> the field (B, T) and metrics. None: the rollout
            sends the field, or a trainer component computes it.
        on_demand: whether a sent field is bound only for a credit with the field in `needs`; other runs do not copy it.
    """

    def __init__(
        self,
        name: str,
        needed_by: str,
        unsent: float | None = None,
        compute: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, float]]] | None = None,
        on_demand: bool = False,
    ):
        super().__init__(name, needed_by, f"every token's {name}")
        self.unsent, self.compute, self.on_demand = unsent, compute, on_demand
        FIELDS[name] = self


class RewardField(ContextValue[torch.Tensor]):
    """A (B,) float64 tensor: the number that the reward function returns under `name` beside a row's score. It is 0 for
    a row without an answer, and NaN for a padding row and where the reward function returned no number."""

    def __init__(self, name: str, needed_by: str):
        super().__init__(name, needed_by, f"each row's {name} of the reward function")


# reference policy's log-probs (verl's trainer computes them), for a loss in a run with a reference policy
REFERENCE_LOG_PROB: ContextValue[torch.Tensor] = ContextValue(
    "ref_log_prob", "a loss's own KL term", "every token's ref_log_prob"
)
