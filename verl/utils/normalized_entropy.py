"""HAPO's h of an entropy (arXiv 2509.16591), for the sampler and the loss alike, and the temperature that follows.

vLLM's processes import this module: it needs torch only.
"""

import torch

from vllm_patches.tempered_requests import ENTROPY_FLOOR

CACHED_LOGITS = 2**20  # on CPU logits of one block: 4 MiB stay in the cache between the passes


def normalize_entropy(
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


def compute_entropy_based_temperature(
    logits: torch.Tensor,
    temperature_tau: float | torch.Tensor,
    **statistics: float | torch.Tensor,
) -> torch.Tensor:
    """T'/T = 1 + temperature_tau h for every row.

    Args:
        logits: (R, V) before any temperature; -inf marks impossible tokens.
        temperature_tau, statistics: numbers, or (R,) tensors; the statistics are those of `normalize_entropy`.

    Returns:
        (R,) float32.
    """
    return 1 + temperature_tau * normalize_entropy(entropy_of_logits(logits), **statistics)


def entropy_of_logits(logits: torch.Tensor) -> torch.Tensor:
    """Entropy (R,) in nats of softmax(logits) with one exponential per logit: log sum e^y - sum y e^y / sum e^y."""
    rows = max(CACHED_LOGITS // logits.shape[-1], 1) if logits.device.type == "cpu" else max(len(logits), 1)
    entropies = []
    for block in logits.split(rows):
        y = block.float() - block.amax(dim=-1, keepdim=True)
        y.clamp_(min=-80.0)  # e^-80 is nothing, and 0 times -inf would be no number
        weights = y.exp()
        total = weights.sum(dim=-1)
        entropies.append(total.log() - weights.mul_(y).sum(dim=-1) / total)
    return torch.cat(entropies)
