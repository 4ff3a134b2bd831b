"""Normalizes a batch's entropies to HAPO's h (arXiv 2509.16591), for sampler and loss."""

from typing import NamedTuple

import numpy as np
import torch

from verl.utils.token_fields import TokenField
from vllm_patches.tempered_requests import ENTROPY_FLOOR

ENTROPY_H = TokenField("entropy_h", "HAPO's loss")


class EntropyStatistics(NamedTuple):
    """The parameters of h = z * (scale_pos if z > 0 else scale_neg), z = (log H - median) / std (`normalize_entropy`).

    `median` is the pivot quantile of log H (the paper's code uses this name for every quantile), `std` the root mean
    square distance from it. `std` and the scales are positive; those that a batch does not define are 1.
    """

    median: float = 0.0
    std: float = 1.0
    scale_pos: float = 1.0
    scale_neg: float = 1.0


def compute_entropy_h(
    entropy: torch.Tensor, response_mask: torch.Tensor, pivot: float = 0.8
) -> tuple[torch.Tensor, EntropyStatistics]:
    """Return the normalized entropy (B, T) of every token (section 3.1 of the paper, with h's sign kept), and the
    statistics.

    `entropy` (B, T) is that of the old policy over the full vocabulary, in nats; `pivot` is the quantile of log H at
    which h is 0 (nearest rank). h has no gradient and is 0 outside the mask, without valid tokens, and if all entropies
    are equal. Tokens whose entropy is not finite do not count; verl's entropy is not finite where a logit is -inf.
    """
    # On the CPU numpy's selection and partition are several times faster than torch's masked_select and kthvalue.
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
    # leaky_relu_ multiplies negative values by scale_neg / scale_pos, in one pass and in place.
    torch.nn.functional.leaky_relu_(x, statistics.scale_neg / statistics.scale_pos).clamp_(-1.0, 1.0)
    h.numpy()[valid] = x.numpy()
    return h.to(entropy.device), statistics
