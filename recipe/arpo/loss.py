"""The mathematics of AEPO (arXiv 2510.14545): balanced clipping and advantage, both in the loss `aepo`.

The standardized entropy is computed once per training step over the whole batch, so that no result depends on how the
batch is cut. Shapes: B trajectories, T response positions.
"""

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla
from verl.utils.torch_functional import masked_mean

from verl.utils.parts import register_loss
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT


@dataclass(frozen=True, config=STRICT)
class AEPOKeys:
    """Keys under actor_rollout_ref.actor.

    Args:
        enable_entropy_balanced_clipping: whether tokens above the upper clip keep a gradient.
        enable_entropy_balanced_advantage: whether advantages grow with the standardized entropy z.
        entropy_advantage_coef: relative change of an advantage per standard deviation of the entropy.
    """

    enable_entropy_balanced_clipping: bool = False
    enable_entropy_balanced_advantage: bool = False
    entropy_advantage_coef: float = Field(default=0.2, ge=0, le=1)


def standardize_entropy(entropy: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Return z = (H - mean) / std over the batch's valid tokens, and as metrics mean and std (of the population; in
    nats) and the share of tokens with z > 0.

    `entropy` (B, T) is the old policy's over the full vocabulary, in nats. z (B, T) is float32 without gradient, 0
    outside the mask, and all 0 where the entropies do not differ. Tokens whose entropy is not finite, as upstream's is
    where a logit is -inf, do not count.
    """
    counted = mask.bool() & entropy.isfinite()
    standardized = torch.where(counted, entropy.detach().float(), 0.0)
    n, mean, std = counted.sum().item(), 0.0, 0.0
    if n:
        mean = standardized.sum(dtype=torch.float64).item() / n
        standardized.sub_(mean).mul_(counted)
        std = torch.linalg.vector_norm(standardized, dtype=torch.float64).item() / n**0.5
        # Equal entropies may differ by rounding.
        standardized.mul_(1 / std if std > 1e-6 else 0.0)
    grew = masked_mean((standardized > 0).float(), mask).item()
    return standardized, {"aepo/entropy_mean": mean, "aepo/entropy_std": std, "aepo/advantage_grew": grew}


STANDARDIZED_ENTROPY = TokenField(
    "standardized_entropy", "actor.enable_entropy_balanced_advantage=true", compute=standardize_entropy
)


def entropy_balanced_advantage(
    advantages: torch.Tensor, standardized_entropy: torch.Tensor, coef: float = 0.2
) -> torch.Tensor:
    """Return AEPO's entropy-aware advantage A (1 + coef z), all (B, T); no gradient flows into z. The factor is at
    least 0 (published: no bound), so that no advantage changes its sign."""
    return advantages * (1 + coef * standardized_entropy.detach()).clamp(min=0.0)


def revived_losses(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_ratio_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what balanced clipping adds to PPO's token losses, and the mask of its tokens, both (B, T).

    PPO's upper clip kills the gradient of tokens with A > 0 and a ratio above it; with A < 0 its minimum takes the
    unclipped side there. AEPO's bound (1 + eps_high) ratio / stop_grad(ratio) has the same value and the gradient
    (1 + eps_high) d log_prob; so what is added has the value 0 and that gradient.
    """
    bound = 1 + clip_ratio_high
    killed = (advantages > 0) & (ratio > bound)
    return torch.where(killed, -advantages * bound * (ratio / ratio.detach() - 1), 0.0), killed


@register_loss(
    "aepo",
    "AEPO (arXiv 2510.14545): tokens above the upper clip keep a gradient, advantages grow with the standardized "
    "entropy",
    requires="no algorithm.rollout_correction.bypass_mode: the old policy's entropies",
    keys=AEPOKeys,
    switches={"enable_entropy_balanced_clipping": None, "enable_entropy_balanced_advantage": STANDARDIZED_ENTROPY},
    values={"enable_entropy_balanced_clipping": True, "enable_entropy_balanced_advantage": True},
    proportional=True,
)
def compute_policy_loss_aepo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """Return the loss of upstream's dual-clip PPO (`vanilla`) with AEPO's two mechanisms; all tensors (B, T).

    Balanced clipping leaves the loss's value and changes its gradient; the balanced advantage changes both. With both
    switches off it is `vanilla`. z comes from `STANDARDIZED_ENTROPY`, which the trainer binds
    (verl/utils/token_fields.py).
    """
    if config.enable_entropy_balanced_advantage:
        advantages = entropy_balanced_advantage(advantages, STANDARDIZED_ENTROPY.get(), config.entropy_advantage_coef)
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    if config.enable_entropy_balanced_clipping:
        high = config.clip_ratio_high if config.clip_ratio_high is not None else config.clip_ratio
        ratio = (log_prob - old_log_prob).clamp(min=-20.0, max=20.0).exp()
        losses, alive = revived_losses(ratio, advantages, high)
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        loss = loss + agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
        metrics["actor/aepo/kept_alive"] = masked_mean(alive.float(), response_mask).item()
    return loss, metrics
