"""What policy losses share: the dual clip, and means of token metrics."""

from collections.abc import Mapping

import torch


def dual_clip(
    advantages: torch.Tensor,
    ratio: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    clip_ratio_c: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return dual-clip PPO's loss (arXiv 1912.09729) of each token, and whether each was clipped, by metric.

    `advantages` and `ratio` are (B, T), `low` and `high` clip ranges around 1, and `clip_ratio_c` is the largest ratio
    that counts at a negative advantage.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    pessimistic = torch.maximum(unclipped, clipped)
    worst_case = -advantages * clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(worst_case, pessimistic), pessimistic)
    capped = (pessimistic > worst_case) & (advantages < 0)
    return losses, {"actor/pg_clipfrac": clipped > unclipped, "actor/pg_clipfrac_lower": capped}


def token_means(values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, float]:
    """Return the mean of each tensor where `mask` (0 or 1, same shape) is 1; 0 where it never is. All numbers leave
    the device together."""
    valid = mask.bool()
    sums = [torch.where(valid, tensor.detach(), 0.0).sum() for tensor in values.values()]
    means = torch.stack(sums) / valid.sum().clamp(min=1)
    return dict(zip(values, means.tolist(), strict=True))
