"""HAPO's mathematics (arXiv 2509.16591): normalised entropy h, adaptive clipping, advantages, and the policy loss.

h in [-1, 1] tells how uncertain the old policy was at a token, against the batch: 0 at the pivot quantile, 1 at the
most uncertain token, -1 at the most certain one. What depends on the batch (h, its statistics) is computed once per
training step over the whole batch; the loss only looks h up, so that it does not depend on how the batch is cut into
micro-batches. Shapes: B responses, T response positions, G prompt groups.

    >>> entropy = torch.tensor([[0.01, 0.1, 1.0, 10.0]])
    >>> h, statistics = compute_entropy_h(entropy, torch.ones(1, 4), pivot=0.34)
    >>> h  # pivot: 0.1; one token below it, two above it, twice as far in the logarithm
    tensor([[-1.0000,  0.0000,  0.5000,  1.0000]])
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

from verl.trainer.ppo.credit.nodes import groups_of_equals
from verl.utils.normalized_entropy import ENTROPY_FLOOR, normalize_entropy
from verl.utils.token_fields import TokenField

FALLBACK_BOUND = 5.0  # a group with a larger token-level advantage takes GRPO's


class EntropyStatistics(NamedTuple):
    """What turns an entropy into h: h = z * (scale_pos if z > 0 else scale_neg), z = (log H - median) / std.

    `median` is the pivot quantile of log H (the paper's code calls it so whatever the quantile), `std` the root mean
    square distance from it. All but `median` are positive; where the batch does not define one it is 1.
    """

    median: float = 0.0
    std: float = 1.0
    scale_pos: float = 1.0
    scale_neg: float = 1.0


def entropy_to_h(entropy: torch.Tensor, statistics: EntropyStatistics) -> torch.Tensor:
    """h of entropies in nats (any shape), clamped to [-1, 1], for the statistics of this or an earlier batch."""
    return normalize_entropy(entropy, *statistics)


def compute_entropy_h(
    entropy: torch.Tensor, response_mask: torch.Tensor, pivot: float = 0.8
) -> tuple[torch.Tensor, EntropyStatistics]:
    """Normalised entropy of every token of the batch (section 3.1 of the paper, with h's sign kept).

    Args:
        entropy: (B, T) entropy in nats of the old policy over the full vocabulary.
        response_mask: (B, T) tokens that count; the others get h = 0.
        pivot: quantile of log H where h is 0 (nearest rank), in [0, 1].

    Returns:
        h (B, T) float32 without gradient, and the statistics. No valid token, or all entropies equal: h = 0. Tokens
        whose entropy is not finite, as upstream's is where a logit is -inf, do not count.

    Raises:
        ValueError: `pivot` outside [0, 1].
    """
    if not 0.0 <= pivot <= 1.0:
        raise ValueError(f"pivot={pivot}: expected a quantile in [0, 1]")
    # on the CPU with numpy's selection and partition: several times faster than torch's masked_select and kthvalue
    valid = (response_mask.bool() & entropy.isfinite()).cpu().numpy()
    x = torch.from_numpy(entropy.detach().float().cpu().numpy()[valid]).clamp_(min=ENTROPY_FLOOR).log_()
    h = torch.zeros(entropy.shape, dtype=torch.float32)
    if not x.numel():
        return h.to(entropy.device), EntropyStatistics()
    rank = round(pivot * (x.numel() - 1))
    median = float(np.partition(x.numpy(), rank)[rank])
    x.sub_(median)
    std = torch.linalg.vector_norm(x, dtype=torch.float64).item() / x.numel() ** 0.5
    if std < 1e-6:
        return h.to(entropy.device), EntropyStatistics(median=median)
    lowest, highest = (bound.item() / std for bound in x.aminmax())
    statistics = EntropyStatistics(
        median=median,
        std=std,
        scale_pos=1 / highest if highest > 0 else 1.0,
        scale_neg=1 / -lowest if lowest < 0 else 1.0,
    )
    x.mul_(statistics.scale_pos / std)
    # one pass, in place: times scale_neg / scale_pos where negative
    torch.nn.functional.leaky_relu_(x, statistics.scale_neg / statistics.scale_pos).clamp_(-1.0, 1.0)
    h.numpy()[valid] = x.numpy()
    return h.to(entropy.device), statistics


def ada_clip(
    h: torch.Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Asymmetric adaptive clip ranges (eps_low', eps_high'), each of h's shape.

    A certain token (h <= 0) may fall further, an uncertain one (h > 0) may rise further; the other side stays.
    """
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
    """Differential advantage redistribution: A (1 + adv_beta h) on some tokens, A on the others.

    Uncertain tokens (h > 0) are redistributed where the ratio lies outside (1 - low/2, 1 + high/2), certain ones
    (h <= 0) where it lies inside. Neither the choice nor h has a gradient.

    Returns:
        the advantages, and a boolean mask of the tokens whose advantage was redistributed.
    """
    ratio = ratio.detach()
    outside = (ratio <= 1 - low / 2) | (ratio >= 1 + high / 2)
    redistributed = torch.where(h > 0, outside, ~outside)
    return torch.where(redistributed, advantages * (1 + adv_beta * h), advantages), redistributed


def token_level_group_advantage(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    groups: torch.Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage of every response against its group's mean over tokens, not over responses.

    Args:
        scores: (B,) outcome reward of each response.
        lengths: (B,) its number of valid tokens.
        groups: (B,) its group, 0 to G-1, every number used.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: divide by the standard deviation; False: subtract the mean only.

    Returns:
        advantages (B,), exactly 0 where a group's scores are equal, and (G,) whether the group took GRPO's advantage
        because a value reached 5 (a rare outcome in short responses: the mean over tokens hardly moves, the value
        explodes).
    """
    n_groups = int(groups.max()) + 1 if groups.numel() else 0

    def per_group(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(n_groups).index_add_(0, groups, values)

    def normalised(weights: torch.Tensor, degrees_of_freedom: int) -> torch.Tensor:
        total = per_group(weights)
        centred = scores - (per_group(weights * scores) / total.clamp(min=1.0))[groups]
        if not norm_adv_by_std_in_grpo:
            return centred
        variance = per_group(weights * centred.square()) / (total - degrees_of_freedom).clamp(min=1.0)
        return centred / (variance.sqrt()[groups] + epsilon)

    lengths = lengths.to(scores.dtype)
    by_token = normalised(lengths, 0)
    has_tokens = lengths > 0
    too_large = ((by_token.abs() >= FALLBACK_BOUND) & has_tokens).to(scores.dtype)
    fallback = per_group(too_large) > 0
    by_response = normalised(torch.ones_like(scores), 1)
    advantages = torch.where(fallback[groups], by_response, by_token)
    return advantages.masked_fill(groups_of_equals(scores, groups), 0.0), fallback


@register_adv_est("hapo")
def compute_hapo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """HAPO's outcome advantage (`algorithm.adv_estimator=hapo`): token-level group average.

    Args:
        token_level_rewards: (B, T); their sum is the response's outcome.
        response_mask: (B, T); advantages outside it are 0.
        index: (B,) prompt ids; equal ones are one group.
        epsilon, norm_adv_by_std_in_grpo: see `token_level_group_advantage`; None: as `config` says, else True.
        config: upstream's algorithm config; upstream gives a registered estimator this, not the key.

    Returns:
        advantages and returns, the same (B, T) tensor.
    """
    if norm_adv_by_std_in_grpo is None:
        norm_adv_by_std_in_grpo = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    with torch.no_grad():
        groups = torch.from_numpy(np.unique(index, return_inverse=True)[1]).to(token_level_rewards.device)
        mask = response_mask.to(torch.float32, copy=True)  # becomes the result; sums of a bool tensor are slow
        scores, lengths = token_level_rewards.sum(dim=-1), mask.sum(dim=-1)
        advantages, _ = token_level_group_advantage(scores, lengths, groups, epsilon, norm_adv_by_std_in_grpo)
        advantages = mask.mul_(advantages.unsqueeze(-1))
    return advantages, advantages


ENTROPY_H = TokenField("entropy_h", "actor.policy_loss.loss_mode=hapo")


@register_policy_loss("hapo")
def compute_policy_loss_hapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """Dual-clip PPO with HAPO's clip ranges and advantages; all tensors (B, T).

    `config` is the actor's, with `adaptive_clip`, `clip_alpha`, `adaptive_advantage`, `adv_beta`. With both
    mechanisms off it is upstream's `vanilla` loss. h comes from `ENTROPY_H`.

    Raises:
        RuntimeError: h is needed and nobody gave it.
    """
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

    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    pessimistic = torch.maximum(unclipped, clipped)
    worst_case = -advantages * config.clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(worst_case, pessimistic), pessimistic)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    capped = (pessimistic > worst_case) & (advantages < 0)
    metrics |= {
        "actor/pg_clipfrac": clipped > unclipped,
        "actor/pg_clipfrac_lower": capped,
        "actor/ppo_kl": -negative_approx_kl,
    }
    return loss, token_means(metrics, response_mask)


def token_means(values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, float]:
    """Of each tensor, with the shape of `mask` (0 or 1), its mean where that is 1; 0 where it never is. The numbers
    leave the device together."""
    valid = mask.bool()
    sums = [torch.where(valid, tensor.detach(), 0.0).sum() for tensor in values.values()]
    means = torch.stack(sums) / valid.sum().clamp(min=1)
    return dict(zip(values, means.tolist(), strict=True))
