"""Entropies of next-token distributions of which the most likely tokens are known, as a rollout engine reports them."""

import math
from collections.abc import Sequence

import numpy as np


def entropies_of(log_probs: np.ndarray, vocab_size: int) -> np.ndarray:
    """Entropies in nats, (T,), from the log-probabilities (T, k) of each step's k most likely tokens.

    Exact when k is the vocabulary's size. Else the tail's share lies between as few tokens as may be, each as likely as
    the last known one, and an even spread over the rest of the vocabulary: the middle of the two bounds. A token of
    log-probability -inf counts as known, but says nothing of the tail's tokens.
    """
    known, others = np.isfinite(log_probs), max(vocab_size - log_probs.shape[1], 0)
    surprise, probs = np.where(known, -log_probs, 0.0), np.exp(log_probs)
    head, rest = (probs * surprise).sum(1), 1 - probs.sum(1)
    has_tail = (rest > 1e-9) & (others > 0) & known.any(1)
    rest, others = np.where(has_tail, rest, 1.0), max(others, 1)
    least, most = rest * surprise.max(1, initial=0.0), -rest * np.log(rest / others)
    return head + np.where(has_tail, (least + np.maximum(least, most)) / 2, 0.0)


def mean_entropy(entropies: Sequence[float], vocab_size: int) -> float:
    """The mean of entropies in nats, over log |V|; 0 for none."""
    return float(np.mean(entropies)) / math.log(vocab_size) if entropies else 0.0
