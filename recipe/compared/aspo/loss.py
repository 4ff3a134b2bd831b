"""ASPO, the loss of Archer2 (arXiv 2510.06062), `loss=aspo`: the ratio of tokens with a positive advantage is inverted.

With r = pi / pi_old, the gradient of a token's loss is -A w grad log pi:

    A > 0    w = 1/r; no gradient where r > 1 + eps
    A < 0    w = r;   no gradient where r < 1 - eps

w is at most c, and the gradient goes on there. eps is 0.2, and 0.4 for tokens of high entropy, which are those above
the 0.8 quantile of their response, as with archer. c is 3 (`clip_ratio_c`). There is no KL term.

Differences from the published code: the ranges, c and the quantile are keys that are read (published: literals);
the aggregation mode is the actor's; entropies are the old policy's, as with archer; a token's loss is -A w everywhere,
so that the logged loss has one scale (published: another one above c, with the same gradient).
"""

import torch
from verl.trainer.ppo.core_algos import agg_loss

from verl.trainer.ppo.loss.token_losses import ENTROPY_RANK, EntropyClipKeys, clip_ranges, token_means
from verl.utils.parts import register_loss


@register_loss(
    "aspo",
    "ASPO (arXiv 2510.06062): tokens with a positive advantage are weighted by the inverse ratio",
    requires="no algorithm.rollout_correction.bypass_mode: the old policy's entropies",
    keys=EntropyClipKeys,
    needs=(ENTROPY_RANK,),
    values={"high_entropy_clip_ratio_low": 0.4, "high_entropy_clip_ratio_high": 0.4, "clip_ratio_c": 3.0},
    proportional=True,
)
def compute_policy_loss_aspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """Return ASPO's loss, with the gradient above, and metrics; all tensors (B, T)."""
    high, below, above = clip_ranges(config)
    log_ratio = (log_prob - old_log_prob).detach().clamp(min=-20.0, max=20.0)
    ratio, positive = log_ratio.exp(), advantages > 0
    clipped = torch.where(positive, ratio > 1 + above, (ratio < 1 - below) & (advantages < 0))
    weights = torch.where(positive, 1 / ratio, ratio)
    score = (log_prob - log_prob.detach()).exp()  # 1, with the gradient of log_prob
    losses = -advantages * weights.clamp(max=config.clip_ratio_c) * torch.where(clipped, 1.0, score)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    metrics = {
        "actor/pg_clipfrac": clipped,
        "actor/pg_clipfrac_lower": weights > config.clip_ratio_c,
        "actor/ppo_kl": -log_ratio,
        "actor/archer/high_entropy_share": high,
    }
    return loss, token_means(metrics, response_mask)
