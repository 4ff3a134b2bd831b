"""HAPO's credit (arXiv 2509.16591), `algorithm.adv_estimator=hapo`: a group's average over tokens, not over responses.

Shapes: B responses, T response positions.
"""

import numpy as np
import torch

from verl.trainer.ppo.credit.nodes import weighted_advantages
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
    groups = torch.from_numpy(np.unique(index, return_inverse=True)[1])
    scores, lengths = rewards.sum(dim=-1).double(), mask.sum(dim=-1).double()
    by_token = weighted_advantages(scores, groups, lengths, epsilon, norm, degrees_of_freedom=0)
    too_large = (by_token.abs() >= FALLBACK_BOUND) & (lengths > 0)
    falls_back = (groups.bincount(too_large.double()) > 0)[groups]
    by_response = weighted_advantages(scores, groups, torch.ones_like(scores), epsilon, norm)
    return torch.where(falls_back, by_response, by_token).to(rewards.dtype).unsqueeze(-1)
