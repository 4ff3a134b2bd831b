"""A sampling temperature that follows the entropy of the token's distribution (HAPO, arXiv 2509.16591, section 3.1)."""

import torch

from vllm_patches.tempered_requests import ENTROPY_FLOOR

CACHED_LOGITS = 2**20  # number of logits of a block on CPU: 4 MiB stay in the cache between the passes


def normalize_entropy(
    entropy: torch.Tensor,
    median: float | torch.Tensor,
    std: float | torch.Tensor,
    scale_pos: float | torch.Tensor,
    scale_neg: float | torch.Tensor,
) -> torch.Tensor:
    """Return h = clamp(z * (scale_pos if z > 0 else scale_neg), -1, 1) with z = (log H - median) / std, for H in nats:
    float32, of the shape of `entropy`, without gradient. The other arguments are numbers, or tensors that broadcast."""
    z = (entropy.detach().float().clamp(min=ENTROPY_FLOOR).log_() - median).div_(std)
    return z.mul_(torch.where(z > 0, scale_pos, scale_neg)).clamp_(-1.0, 1.0)


def compute_entropy_based_temperature(
    logits: torch.Tensor, temperature_tau: float | torch.Tensor, **statistics: float | torch.Tensor
) -> torch.Tensor:
    """Return (R,) float32, the factor 1 + temperature_tau h by which HAPO multiplies the temperature of every row of
    logits (R, V) before any temperature; -inf marks impossible tokens. The other arguments, numbers or (R,) tensors,
    are those of `normalize_entropy`."""
    return 1 + temperature_tau * normalize_entropy(entropy_of_logits(logits), **statistics)


def entropy_of_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy (R,) of softmax(logits) in nats, log sum e^y - sum y e^y / sum e^y, with an exp per logit."""
    rows = max(CACHED_LOGITS // logits.shape[-1], 1) if logits.device.type == "cpu" else max(len(logits), 1)
    entropies = []
    for block in logits.split(rows):
        y = block.float() - block.amax(dim=-1, keepdim=True)
        y.clamp_(min=-80.0)  # e^-80 is negligible, and 0 times -inf would be NaN.
        weights = y.exp()
        total = weights.sum(dim=-1)
        entropies.append(total.log() - weights.mul_(y).sum(dim=-1) / total)
    return torch.cat(entropies)
