"""A language model without weights, whose distributions are drawn with the tokens before them as the seed."""

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch


class ToyModel:
    """Stands for a `transformers` causal LM in `TransformersEngine`: readable, and the same on every machine.

    Args:
        weights: how often it writes a token, on average; all other tokens have a log-probability of about -30.
        n_vocabulary: size of the vocabulary.
        seed: another one makes another model.
        sharpness: the larger, the surer the model is.
        memory: number of tokens that decide about the next one.
    """

    device = torch.device("cpu")

    def __init__(
        self, weights: Mapping[int, float], n_vocabulary: int, seed: int = 0, sharpness: float = 3.0, memory: int = 6
    ):
        self.tokens, self.usual = list(weights), torch.tensor(list(weights.values())).log()
        self.n_vocabulary, self.seed, self.sharpness, self.memory = n_vocabulary, seed, sharpness, memory

    def __call__(self, input_ids: torch.Tensor, past_key_values=None, logits_to_keep: int = 0, **options):
        """Return `logits` (1, number of tokens to keep, V) after each token, as transformers' models do."""
        before = past_key_values or []
        ids = [*before, *input_ids[0].tolist()]
        ends = range(len(before) + 1, len(ids) + 1)[-logits_to_keep:]
        logits = torch.stack([self._logits(ids[:end]) for end in ends])
        return SimpleNamespace(logits=logits.unsqueeze(0), past_key_values=ids)

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        draw = random.Random(f"{self.seed} {list(ids[-self.memory :])}")
        logits = torch.full((self.n_vocabulary,), -30.0)
        drawn = torch.tensor([draw.random() for _ in self.tokens]).clamp(1e-4).log()
        logits[self.tokens] = self.usual + self.sharpness * drawn
        return logits
