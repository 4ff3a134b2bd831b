"""HAPO's h of an entropy (arXiv 2509.16591), for the sampler and the loss alike. Needs torch only."""

import torch

ENTROPY_FLOOR = 1e-6  # nats; a token that was certain has entropy 0 and no logarithm


def normalise_entropy(
    entropy: torch.Tensor,
    median: float | torch.Tensor,
    std: float | torch.Tensor,
    scale_pos: float | torch.Tensor,
    scale_neg: float | torch.Tensor,
) -> torch.Tensor:
    """h = clamp(z * (scale_pos if z > 0 else scale_neg), -1, 1) with z = (log H - median) / std.

    Args:
        entropy: in nats, any shape. The others: numbers, or tensors that broadcast with it.

    Returns:
        float32, the shape of `entropy`, without gradient.
    """
    z = (entropy.detach().float().clamp(min=ENTROPY_FLOOR).log_() - median).div_(std)
    return z.mul_(torch.where(z > 0, scale_pos, scale_neg)).clamp_(-1.0, 1.0)
