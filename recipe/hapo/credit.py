"""HAPO's credit (arXiv 2509.16591), `algorithm.adv_estimator=hapo`: a group's average over tokens, not over responses.

Shapes: B responses, T response positions.
"""

import numpy as np
import torch

from verl.trainer.ppo.credit.nodes import groups_of_equals
from verl.utils.parts import Compares, register_credit

FALLBACK_BOUND = 5.0  # a group with a larger token-level advantage takes GRPO's


@register_credit(
    "hapo",
    "HAPO's group average over tokens (arXiv 2509.16591): long responses weigh more in a group's mean than short ones",
    compares=Compares.GROUP,
)
def compute_hapo_outcome_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool
) -> torch.Tensor:
    """Return every response's advantage (B, 1) against its group's mean and standard deviation over tokens, not
    responses. It is exactly 0 where a group's outcomes are equal.

    A group takes GRPO's advantages if the absolute value of one of its own reaches 5: a rare outcome in short responses
    hardly moves the mean over tokens, so that its advantage explodes.
    """
    groups = torch.from_numpy(np.unique(index, return_inverse=True)[1]).to(rewards.device)
    scores = rewards.sum(dim=-1)
    lengths = mask.float().sum(dim=-1).to(scores.dtype)
    n_groups = int(groups.max()) + 1 if groups.numel() else 0

    def per_group(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(n_groups).index_add_(0, groups, values)

    def normalized(weights: torch.Tensor, degrees_of_freedom: int) -> torch.Tensor:
        total = per_group(weights)
        centered = scores - (per_group(weights * scores) / total.clamp(min=1.0))[groups]
        if not norm:
            return centered
        variance = per_group(weights * centered.square()) / (total - degrees_of_freedom).clamp(min=1.0)
        return centered / (variance.sqrt()[groups] + epsilon)

    by_token = normalized(lengths, 0)
    too_large = ((by_token.abs() >= FALLBACK_BOUND) & (lengths > 0)).to(scores.dtype)
    fallback = per_group(too_large) > 0
    by_response = normalized(torch.ones_like(scores), 1)
    advantages = torch.where(fallback[groups], by_response, by_token)
    return advantages.masked_fill(groups_of_equals(scores, groups), 0.0).unsqueeze(-1)
