"""The worker's loss function for losses that declare token fields, which they read during upstream's `ppo_loss`."""

from collections.abc import Sequence
from contextlib import ExitStack

from tensordict import TensorDict
from verl.workers.utils.losses import ppo_loss

from verl.utils.token_fields import FIELDS, REFERENCE_LOG_PROB, ContextValue


def ppo_loss_with_fields(config, model_output, data: TensorDict, dp_group=None, *, fields: Sequence[str]):
    """Return the result of upstream's `ppo_loss`, during which the token fields are bound.

    Args:
        data: the loss's batch, which also holds each field as a nested tensor with one 1-D tensor per row. If it holds
            `ref_log_prob`, this is bound, too.
        fields: names of the token fields.
    """
    values: dict[str, ContextValue] = {name: FIELDS[name] for name in fields}
    if REFERENCE_LOG_PROB.name in data:
        values[REFERENCE_LOG_PROB.name] = REFERENCE_LOG_PROB
    padded = data.select(*values).to_padded_tensor()
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(value.bound(padded[name]))
        return ppo_loss(config, model_output, data, dp_group)
