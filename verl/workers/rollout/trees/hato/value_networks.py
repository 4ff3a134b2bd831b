"""Several small networks of the same shape, evaluated at once: what `value_model` learns with.

Shapes: N rows, F features, H hidden units, K networks, or dropout masks of the one network.
"""

from itertools import pairwise

import torch
from torch import nn


class Networks(nn.Module):
    """`members` ReLU networks with one logit each.

    Args:
        n_layers: hidden layers.
        prior: a fixed random network, of standard deviation about 0.7, is added to each.
        dropout: above 0 (one member only), `logits` are those under `n_masks` fixed masks on the hidden units.
    """

    def __init__(
        self,
        n_features: int,
        hidden_size: int,
        n_layers: int,
        members: int,
        *,
        prior: bool,
        dropout: float,
        n_masks: int,
        seed: int,
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = [n_features] + [hidden_size] * n_layers + [1]
        self.members, self.dropout, self.prior = members, dropout, prior
        self.weights, self.biases = _layers(sizes, members, generator)
        self.prior_weights, self.prior_biases = _layers(sizes, members, generator)
        self.prior_weights.requires_grad_(False)
        self.prior_biases.requires_grad_(False)
        masks = [_mask((n_masks, 1, hidden_size), dropout, generator) for _ in range(n_layers)] if dropout else []
        self.register_buffer("masks", torch.stack(masks) if masks else None)

    def logits(self, features_NF: torch.Tensor) -> torch.Tensor:
        """(K, N)."""
        return self._with_prior(features_NF, self.masks)

    def logits_to_learn(self, features_NF: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """(members, N), under fresh dropout masks for each row."""
        masks = None
        if self.dropout:
            shape = (self.members, len(features_NF), self.weights[0].shape[-1])
            masks = [_mask(shape, self.dropout, generator) for _ in self.weights[:-1]]
        return self._with_prior(features_NF, masks)

    def _with_prior(self, features_NF: torch.Tensor, masks) -> torch.Tensor:
        logits = _forward(self.weights, self.biases, features_NF, masks)
        if not self.prior:
            return logits
        return logits + _forward(self.prior_weights, self.prior_biases, features_NF, None)


def _layers(sizes: list[int], members: int, generator: torch.Generator) -> tuple[nn.ParameterList, nn.ParameterList]:
    """He's initialisation, with random biases; the output has a standard deviation of about 0.7."""
    pairs = list(pairwise(sizes))
    weights = [torch.randn(members, a, b, generator=generator) * ((1 if b == 1 else 2) / a) ** 0.5 for a, b in pairs]
    biases = [torch.randn(members, 1, b, generator=generator) * 0.3 * (b > 1) for _, b in pairs]
    return nn.ParameterList(weights), nn.ParameterList(biases)


def _mask(shape: tuple[int, ...], dropout: float, generator: torch.Generator) -> torch.Tensor:
    """1 / (1 - dropout) where a unit stays, else 0."""
    return (torch.rand(shape, generator=generator) >= dropout).float() / (1 - dropout)


def _forward(weights, biases, features_NF: torch.Tensor, masks) -> torch.Tensor:
    """(K, N): `masks` None, or for each hidden layer a tensor that broadcasts over (K, N, H)."""
    hidden = features_NF.expand(len(weights[0]), -1, -1)
    for layer, (weight, bias) in enumerate(zip(weights[:-1], biases[:-1], strict=True)):
        hidden = (hidden @ weight + bias).relu()
        if masks is not None:
            hidden = hidden * masks[layer]
    return (hidden @ weights[-1] + biases[-1]).squeeze(-1)
