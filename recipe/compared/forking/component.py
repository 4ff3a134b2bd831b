"""80/20 in the trainer: selects the tokens that the loss `forking` keeps, by the entropies of the whole step."""

import torch

from recipe.compared.forking.loss import FORKING_WEIGHT, forking_weights
from verl.trainer.ppo.v1.component import Component
from verl.utils.parts import register_component


@register_component
class ForkingTokens(Component):
    """Component that computes the weight of every token for the loss `forking`."""

    computes = (FORKING_WEIGHT,)

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        actor = self.config.actor_rollout_ref.actor
        weights, threshold = forking_weights(entropy, mask, actor.forking_ratio, actor.forking_denominator)
        metrics["forking/entropy_threshold"] = threshold
        metrics["forking/kept_share"] = ((weights > 0).sum() / mask.sum().clamp(min=1)).item()
        return {FORKING_WEIGHT.name: weights}
