"""The worker's loss function for AEPO: upstream's `ppo_loss` with each token's standardised entropy at hand."""

from tensordict import TensorDict
from verl.workers.utils.losses import ppo_loss

from verl.trainer.ppo.aepo_algos import STANDARDISED_ENTROPY


def aepo_ppo_loss(config, model_output, data: TensorDict, dp_group=None):
    """See upstream's `ppo_loss`; `data` also holds the field `standardised_entropy`, nested (B, T of each row)."""
    field = STANDARDISED_ENTROPY.name
    with STANDARDISED_ENTROPY.given(data.select(field).to_padded_tensor()[field]):
        return ppo_loss(config, model_output, data, dp_group)
