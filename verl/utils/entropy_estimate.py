"""Estimates entropies of next-token distributions from the most likely tokens, as a rollout engine reports them."""

import math
from collections.abc import Sequence

import numpy as np


def entropies_of(log_probs: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return entropies (T,) in nats from the log-probabilities (T, k) of each step's k most likely tokens.

    The result is exact if k is the vocabulary size. Otherwise it is the midpoint of two bounds: the remaining mass sits
    on as few tokens as possible, each as likely as the least likely reported one, or is spread evenly over the tokens
    that are not reported. Reported tokens with log-probability -inf count as impossible and do not change the bounds.
    """
    finite, others = np.isfinite(log_probs), max(vocab_size - log_probs.shape[1], 0)
    surprise, probs = np.where(finite, -log_probs, 0.0), np.exp(log_probs)
    head, rest = (probs * surprise).sum(1), 1 - probs.sum(1)
    has_tail = (rest > 1e-9) & (others > 0) & finite.any(1)
    rest, others = np.where(has_tail, rest, 1.0), max(others, 1)
    least, most = rest * surprise.max(1, initial=0.0), -rest * np.log(rest / others)
    return head + np.where(has_tail, (least + np.maximum(least, most)) / 2, 0.0)


def mean_entropy(entropies: Sequence[float], vocab_size: int) -> float:
    """Return mean(entropies) / log(vocab_size), in [0, 1], for entropies in nats; 0 without entropies."""
    return float(np.mean(entropies)) / math.log(vocab_size) if entropies else 0.0
