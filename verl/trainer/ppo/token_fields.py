"""What a loss or an estimator needs of every token beside the arguments that upstream's registered functions have.

Such a function declares a `TokenField`. The trainer computes the field once per step over the whole batch, so that no
result depends on how the batch is cut, and sends it with the rows; the worker's loss hands it on (`field_losses`).
"""

from contextlib import contextmanager
from contextvars import ContextVar

import torch

FIELDS: dict[str, "TokenField"] = {}


class TokenField:
    """A (B, T) tensor for a function whose signature upstream fixes: `with FIELD.given(tensor): ...`.

    Args:
        name: of the field in a batch, too.
        needed_by: what asks for it, in a user's words.
    """

    def __init__(self, name: str, needed_by: str):
        self.name, self.needed_by = name, needed_by
        self._tensor: ContextVar[torch.Tensor | None] = ContextVar(name, default=None)
        FIELDS[name] = self

    @contextmanager
    def given(self, tensor: torch.Tensor):
        token = self._tensor.set(tensor)
        try:
            yield
        finally:
            self._tensor.reset(token)

    def get(self) -> torch.Tensor:
        """Raises RuntimeError where no tensor has been given."""
        if (tensor := self._tensor.get()) is None:
            raise RuntimeError(f"{self.needed_by} needs every token's {self.name}, which this trainer does not send")
        return tensor
