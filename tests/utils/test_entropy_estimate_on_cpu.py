"""Entropies from the most likely tokens: exact where all are known, within the tail's bounds elsewhere."""

import math

import numpy as np
import pytest
import torch

from verl.utils.entropy_estimate import entropies_of, mean_entropy


def top_log_probs(logits: torch.Tensor, k: int) -> np.ndarray:
    return logits.log_softmax(-1).topk(k).values.numpy()


def slow(log_probs, vocab_size: int) -> float:
    """The docstring, one token at a time."""
    known = [log_prob for log_prob in log_probs if log_prob > -math.inf]
    head = -sum(math.exp(log_prob) * log_prob for log_prob in known)
    rest, others = 1 - sum(map(math.exp, known)), vocab_size - len(log_probs)
    if rest <= 1e-9 or others <= 0 or not known:
        return head
    least, most = -rest * min(known), -rest * math.log(rest / others)
    return head + (least + max(least, most)) / 2


@pytest.mark.parametrize(("vocabulary", "k"), [(2, 2), (500, 500), (5000, 20)])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0, 10.0])
def test_within_the_bounds_of_the_tail_and_exact_without_one(vocabulary, k, sharpness):
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * sharpness
    known = top_log_probs(logits, k)
    truth = torch.distributions.Categorical(logits=logits).entropy().item()
    rest = 1 - np.exp(known).sum()
    gap = max(0.0, rest * (math.log((vocabulary - k) / rest) + known[0, -1])) if rest > 1e-9 else 0.0
    assert entropies_of(known, vocabulary)[0] == pytest.approx(truth, abs=gap / 2 + 1e-9)


@pytest.mark.parametrize("k", [1, 10, 49, 50])
def test_many_tokens_at_once_against_one_at_a_time(k):
    sharpness = torch.arange(200)[:, None] % 7
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * sharpness
    logits[3, 2:], logits[4, 1:] = -math.inf, -math.inf  # logits after top_k=2, and a certain token
    known = top_log_probs(logits, k)
    assert entropies_of(known, 50).tolist() == pytest.approx([slow(step, 50) for step in known], abs=1e-9)


def test_certainty_no_tokens_and_means():
    assert entropies_of(np.array([[0.0, -math.inf]]), 100).tolist() == [0.0]
    assert entropies_of(np.zeros((0, 10)), 100).tolist() == [] and mean_entropy([], 100) == 0.0
    assert mean_entropy([math.log(4), 0.0], 4) == pytest.approx(0.5)
