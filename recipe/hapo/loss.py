"""HAPO's policy loss (arXiv 2509.16591), `actor.policy_loss.loss_mode=hapo`: clip ranges and advantages follow h.

h in [-1, 1] tells how uncertain the old policy was at a token (recipe/hapo/normalized_entropy.py). The trainer computes
it once per step over the whole batch, so that the loss does not depend on how the batch is cut into micro-batches.
Shapes: B responses, T response positions.
"""

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from verl.trainer.ppo.core_algos import agg_loss

from recipe.hapo.normalized_entropy import ENTROPY_H
from verl.trainer.ppo.loss.token_losses import dual_clip, token_means
from verl.utils.parts import register_loss
from verl.workers.config.keys import ACTOR, STRICT


@dataclass(frozen=True, config=STRICT)
class HAPOKeys:
    """Keys under actor_rollout_ref.actor.

    Args:
        adaptive_clip: whether clip ranges follow each token's normalized entropy h.
        clip_alpha: largest relative change of a clip range: eps (1 + clip_alpha |h|).
        adaptive_advantage: whether to redistribute advantages by h.
        adv_beta: largest relative change of an advantage: A (1 + adv_beta h); at most 1, to keep its sign.
        entropy_pivot: quantile of the batch's log-entropies where h is 0.
    """

    adaptive_clip: bool = False
    clip_alpha: float = 1.0
    adaptive_advantage: bool = False
    adv_beta: float = Field(default=1.0, ge=0, le=1)
    entropy_pivot: float = Field(default=0.8, ge=0, le=1)

    def check(self, config) -> None:
        """Raise ValueError if adaptive_clip has a negative clip_alpha, or can widen the lower clip range to 1."""
        actor = config.actor_rollout_ref.actor
        low = actor.clip_ratio_low if actor.clip_ratio_low is not None else actor.clip_ratio
        if self.adaptive_clip and (self.clip_alpha < 0 or low * (1 + self.clip_alpha) >= 1):
            raise ValueError(
                f"{ACTOR}.clip_alpha={self.clip_alpha}: expected at least 0, and clip_ratio_low (1 + clip_alpha) below "
                f"1, else nothing is clipped; clip_ratio_low is {low}"
            )


def ada_clip(
    h: torch.Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return asymmetric adaptive clip ranges (eps_low', eps_high'), each of h's shape. A certain token (h <= 0) may
    fall further, an uncertain one (h > 0) may rise further; the other side stays."""
    low = clip_ratio_low * (1 - clip_alpha * h.clamp(max=0.0))
    high = clip_ratio_high * (1 + clip_alpha * h.clamp(min=0.0))
    return low, high


def ada_advantage(
    advantages: torch.Tensor,
    h: torch.Tensor,
    ratio: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    adv_beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return redistributed advantages, A (1 + adv_beta h) on some tokens and A on the others, and a mask of the former.

    Uncertain tokens (h > 0) are redistributed where the ratio lies outside (1 - low/2, 1 + high/2), certain ones (h <=
    0) where it lies inside. Neither the choice nor h has a gradient.
    """
    ratio = ratio.detach()
    outside = (ratio <= 1 - low / 2) | (ratio >= 1 + high / 2)
    redistributed = torch.where(h > 0, outside, ~outside)
    return torch.where(redistributed, advantages * (1 + adv_beta * h), advantages), redistributed


@register_loss(
    "hapo",
    "HAPO (arXiv 2509.16591): clip ranges and advantages follow each token's normalized entropy",
    requires="no algorithm.rollout_correction.bypass_mode: the old policy's entropies",
    keys=HAPOKeys,
    switches={"adaptive_clip": ENTROPY_H, "adaptive_advantage": ENTROPY_H},
    values={
        "adaptive_clip": True,
        "adaptive_advantage": True,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 10.0,
    },
    proportional=True,
)
def compute_policy_loss_hapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """Return the loss of dual-clip PPO with HAPO's clip ranges and advantages; all tensors (B, T). With both mechanisms
    off it is upstream's `vanilla` loss. h comes from `ENTROPY_H`, which the trainer binds."""
    clip = config.clip_ratio
    low = config.clip_ratio_low if config.clip_ratio_low is not None else clip
    high = config.clip_ratio_high if config.clip_ratio_high is not None else clip
    negative_approx_kl = (log_prob - old_log_prob).clamp(min=-20.0, max=20.0)
    ratio = negative_approx_kl.exp()
    metrics: dict[str, torch.Tensor] = {}
    if config.adaptive_clip or config.adaptive_advantage:
        h = ENTROPY_H.get()
        if config.adaptive_clip:
            low, high = ada_clip(h, low, high, config.clip_alpha)
            metrics |= {"actor/hapo/clip_low": low, "actor/hapo/clip_high": high}
        if config.adaptive_advantage:
            advantages, redistributed = ada_advantage(advantages, h, ratio, low, high, config.adv_beta)
            metrics["actor/hapo/redistributed"] = redistributed

    losses, clip_metrics = dual_clip(advantages, ratio, low, high, config.clip_ratio_c)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    metrics |= clip_metrics | {"actor/ppo_kl": -negative_approx_kl}
    return loss, token_means(metrics, response_mask)
