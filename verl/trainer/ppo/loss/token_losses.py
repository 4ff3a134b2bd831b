"""The parts that policy losses share: the dual clip, means of token metrics, and clip ranges by a token's entropy.

A token has high entropy if its entropy is above a quantile (linear) of its response's entropies.
"""

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT


def dual_clip(
    advantages: torch.Tensor,
    ratio: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    clip_ratio_c: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return dual-clip PPO's loss (arXiv 1912.09729) of each token (B, T), and whether each was clipped, by metric.
    `low` and `high` are clip ranges around 1, `clip_ratio_c` the largest ratio that counts at a negative advantage."""
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


# ---- clip ranges by entropy ----


@dataclass(frozen=True, config=STRICT)
class EntropyClipKeys:
    """Keys under actor_rollout_ref.actor, for all losses with clip ranges by entropy: the quantile of a response's
    entropies above which a token has high entropy, and the clip ranges of the other tokens and of these."""

    token_entropy_quantile: float = Field(default=0.8, ge=0, lt=1)
    low_entropy_clip_ratio_low: float = Field(default=0.2, gt=0, le=1)
    low_entropy_clip_ratio_high: float = Field(default=0.2, gt=0)
    high_entropy_clip_ratio_low: float = Field(default=0.5, gt=0, le=1)
    high_entropy_clip_ratio_high: float = Field(default=0.5, gt=0)


def entropy_rank(entropy: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the share (B, T) of a response's other tokens with a lower entropy, and no metrics. An entropy is above
    its response's linear q quantile exactly if its rank is above q. Tokens that do not count, or whose entropy is not
    finite, have rank 0."""
    counted = (mask.bool() & entropy.isfinite()).cpu().numpy()
    ranks = np.zeros(entropy.shape, dtype=np.float32)
    for row, own, row_ranks in zip(entropy.float().cpu().numpy(), counted, ranks, strict=True):
        columns = np.flatnonzero(own)
        order = columns[row[columns].argsort()]  # NumPy sorts a row several times as fast as torch
        ascending, place = row[order], np.arange(len(order), dtype=np.float32)
        place[1:][ascending[1:] == ascending[:-1]] = 0  # equal entropies have the first one's rank
        row_ranks[order] = np.maximum.accumulate(place) / np.float32(max(len(order) - 1, 1))
    return torch.from_numpy(ranks).to(entropy.device), {}


ENTROPY_RANK = TokenField("entropy_rank", "a loss with clip ranges by entropy", compute=entropy_rank)


def clip_ranges(config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return whether each token has high entropy, by `ENTROPY_RANK`, and its lower and upper clip range, all (B, T)."""
    high = ENTROPY_RANK.get() > config.token_entropy_quantile
    below = torch.where(high, config.high_entropy_clip_ratio_low, config.low_entropy_clip_ratio_low)
    above = torch.where(high, config.high_entropy_clip_ratio_high, config.low_entropy_clip_ratio_high)
    return high, below, above
