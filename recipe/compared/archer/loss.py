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

from verl.trainer.ppo.loss.token_losses import ENTROPY_RANK, EntropyClipKeys, clip_ranges, dual_clip, token_means
from verl.utils.parts import register_loss
from verl.utils.token_fields import REFERENCE_LOG_PROB
from verl.workers.config.keys import ACTOR, STRICT


@dataclass(frozen=True, config=STRICT)
class ArcherKeys(EntropyClipKeys):
    """Keys under actor_rollout_ref.actor, in addition to `EntropyClipKeys`.

    Args:
        low_entropy_kl_loss_scale_coef: weight of the KL divergence from the reference policy at tokens without high
            entropy; loss=archer sets it to 0.001. It needs use_kl_loss=true, which makes the reference policy, and
            kl_loss_coef=0.
    """

    low_entropy_kl_loss_scale_coef: float = Field(default=0.0, ge=0)

    def check(self, config) -> None:
        """Raise ValueError if a KL weight lacks its reference policy, or adds to upstream's KL of all tokens."""
        actor = config.actor_rollout_ref.actor
        if self.low_entropy_kl_loss_scale_coef and not (actor.use_kl_loss and actor.kl_loss_coef == 0):
            raise ValueError(
                f"{ACTOR}.low_entropy_kl_loss_scale_coef={self.low_entropy_kl_loss_scale_coef} with use_kl_loss="
                f"{actor.use_kl_loss} and kl_loss_coef={actor.kl_loss_coef}: set {ACTOR}.use_kl_loss=true, which makes "
                "the reference policy, and kl_loss_coef=0, as upstream's KL is of all tokens; or the weight to 0"
            )


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
    """Return dual-clip PPO's loss with a clip range for each class, plus the KL of tokens without high entropy, and
    metrics."""
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
