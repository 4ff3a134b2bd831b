"""The worker's loss function for losses that declare token fields: upstream's `ppo_loss` with these at hand."""

from collections.abc import Sequence
from contextlib import ExitStack

from tensordict import TensorDict
from verl.workers.utils.losses import ppo_loss

from verl.utils.token_fields import FIELDS


def ppo_loss_with_fields(config, model_output, data: TensorDict, dp_group=None, *, fields: Sequence[str]):
    """See upstream's `ppo_loss`; `data` also holds `fields`, each nested (B, T of each row)."""
    padded = data.select(*fields).to_padded_tensor()
    with ExitStack() as stack:
        for name in fields:
            stack.enter_context(FIELDS[name].bound(padded[name]))
        return ppo_loss(config, model_output, data, dp_group)
