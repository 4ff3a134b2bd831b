"""The worker's loss function for HAPO: upstream's `ppo_loss` with each token's h at hand."""

from tensordict import TensorDict
from verl.workers.utils.losses import ppo_loss

from verl.trainer.ppo.hapo_algos import entropy_h_of_micro_batch

ENTROPY_H = "entropy_h"


def hapo_ppo_loss(config, model_output, data: TensorDict, dp_group=None):
    """See upstream's `ppo_loss`; `data` also holds the field `entropy_h`, nested (B, T of each row)."""
    h = data.select(ENTROPY_H).to_padded_tensor()[ENTROPY_H]
    with entropy_h_of_micro_batch(h):
        return ppo_loss(config, model_output, data, dp_group)
