"""Archer (arXiv 2507.15778), `loss=archer`: uncertain tokens get a wider clip, the others a KL penalty.

A token has high entropy if its entropy is above the 0.8 quantile (linear) of its own response. Such tokens have a clip
range of 0.5/0.5 and no KL term. The others have 0.2/0.2, and 0.001 times the k3 estimate of the KL divergence from the
reference policy. The dual clip is at 10.

Differences from the published code: entropies are the old policy's, so that a token stays in its class during all
updates of a step (published: the current policy's); the quantile is a key that is read; the KL is averaged over all
tokens, as the rest of the loss is (published: over the tokens without high entropy, which is 1/0.8 times as much).
"""

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

from verl.trainer.ppo.loss.hapo import dual_clip, token_means
from verl.utils.parts import register_loss
from verl.utils.token_fields import REFERENCE_LOG_PROB, TokenField
from verl.workers.config.keys import ACTOR, STRICT


@dataclass(frozen=True, config=STRICT)
class ArcherKeys:
    """Keys under actor_rollout_ref.actor, which the losses archer and aspo read.

    Args:
        token_entropy_quantile: quantile of a response's entropies above which a token has high entropy.
        low_entropy_clip_ratio_low, low_entropy_clip_ratio_high: clip range of the other tokens.
        high_entropy_clip_ratio_low, high_entropy_clip_ratio_high: clip range of tokens of high entropy.
        low_entropy_kl_loss_scale_coef: archer's weight of the KL divergence from the reference policy at tokens without
            high entropy; loss=archer sets it to 0.001. It needs use_kl_loss=true, which makes the reference policy, and
            kl_loss_coef=0.
    """

    token_entropy_quantile: float = Field(default=0.8, ge=0, lt=1)
    low_entropy_clip_ratio_low: float = Field(default=0.2, gt=0, le=1)
    low_entropy_clip_ratio_high: float = Field(default=0.2, gt=0)
    high_entropy_clip_ratio_low: float = Field(default=0.5, gt=0, le=1)
    high_entropy_clip_ratio_high: float = Field(default=0.5, gt=0)
    low_entropy_kl_loss_scale_coef: float = Field(default=0.0, ge=0)

    def check(self, actor) -> None:
        """Raise ValueError if a KL weight lacks its reference policy, or adds to upstream's KL of all tokens."""
        if self.low_entropy_kl_loss_scale_coef and not (actor.use_kl_loss and actor.kl_loss_coef == 0):
            raise ValueError(
                f"{ACTOR}.low_entropy_kl_loss_scale_coef={self.low_entropy_kl_loss_scale_coef} with use_kl_loss="
                f"{actor.use_kl_loss} and kl_loss_coef={actor.kl_loss_coef}: set {ACTOR}.use_kl_loss=true, which makes "
                "the reference policy, and kl_loss_coef=0, as upstream's KL is of all tokens; or the weight to 0"
            )


def entropy_rank(entropy: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the share (B, T) of a response's other tokens with a lower entropy, in [0, 1], and no metrics.

    An entropy is above its response's linear q quantile exactly if its rank is above q. Tokens that do not count, or
    whose entropy is not finite, have rank 0.
    """
    counted = mask.bool() & entropy.isfinite()
    ascending = torch.where(counted, entropy, torch.inf).sort(dim=-1).values
    lower = torch.searchsorted(ascending, torch.where(counted, entropy, -torch.inf))
    return lower / (counted.sum(-1, keepdim=True) - 1).clamp(min=1), {}


ENTROPY_RANK = TokenField("entropy_rank", "Archer's and ASPO's loss", compute=entropy_rank)


def clip_ranges(config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return whether each token has high entropy, by `ENTROPY_RANK`, and its lower and upper clip range, all (B, T)."""
    high = ENTROPY_RANK.get() > config.token_entropy_quantile
    below = torch.where(high, config.high_entropy_clip_ratio_low, config.low_entropy_clip_ratio_low)
    above = torch.where(high, config.high_entropy_clip_ratio_high, config.low_entropy_clip_ratio_high)
    return high, below, above


@register_loss(
    "archer",
    "Archer (arXiv 2507.15778): uncertain tokens of a response get a wider clip, the others a KL penalty",
    requires="no algorithm.rollout_correction.bypass_mode: the old policy's entropies",
    keys=ArcherKeys,
    needs=(ENTROPY_RANK,),
    values={
        "high_entropy_clip_ratio_low": 0.5,
        "high_entropy_clip_ratio_high": 0.5,
        "clip_ratio_c": 10.0,
        "low_entropy_kl_loss_scale_coef": 0.001,
        "use_kl_loss": True,
        "kl_loss_coef": 0.0,
    },
    smallest={f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.low_entropy_kl_loss_scale_coef": 0.0},
    proportional=True,  # except for the KL: it needs use_kl_loss, with which no row is left out
)
def compute_policy_loss_archer(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """Return dual-clip PPO's loss with a clip range for each class, plus the KL of tokens without high entropy.

    All tensors are (B, T). The result is the loss, a scalar, and metrics.
    """
    high, below, above = clip_ranges(config)
    log_ratio = (log_prob - old_log_prob).clamp(min=-20.0, max=20.0)
    losses, clip_metrics = dual_clip(advantages, log_ratio.exp(), below, above, config.clip_ratio_c)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    metrics = clip_metrics | {"actor/ppo_kl": -log_ratio, "actor/archer/high_entropy_share": high}
    if config.low_entropy_kl_loss_scale_coef:
        kl = kl_penalty(log_prob, REFERENCE_LOG_PROB.get(), "low_var_kl") * ~high
        weighted = config.low_entropy_kl_loss_scale_coef * kl
        loss = loss + agg_loss(weighted, response_mask, loss_agg_mode, **config.global_batch_info)
        metrics["actor/archer/low_entropy_kl"] = kl
    return loss, token_means(metrics, response_mask)
