"""ASPO's gradients by hand, and against a slow version that writes each token's gradient down."""

import math
from functools import partial

import pytest
import torch

from recipe.compared.aspo.loss import compute_policy_loss_aspo
from tests.recipe import losses
from tests.recipe.losses import random_batch
from verl.trainer.ppo.loss.entropy_clips import ENTROPY_RANK, entropy_rank

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]


HIGH = {"high_entropy_clip_ratio_low": 0.4, "high_entropy_clip_ratio_high": 0.4}
actor_config = partial(losses.actor_config, "aspo", clip_ratio_c=3.0, **HIGH)


#   ratio, advantage, high entropy, weight in the gradient -A w
TOKENS = [
    (0.5, 1.0, False, 2.0),
    (0.25, 1.0, False, 3.0),  # 1/r = 4 is above c: the weight ends there, the gradient does not
    (1.1, 1.0, False, 1 / 1.1),
    (1.3, 1.0, False, 0.0),
    (1.3, 1.0, True, 1 / 1.3),
    (1.5, 1.0, True, 0.0),
    (0.9, -1.0, False, 0.9),
    (0.7, -1.0, False, 0.0),
    (0.7, -1.0, True, 0.7),
    (0.5, -1.0, True, 0.0),
    (2.0, -1.0, False, 2.0),  # not clipped from above
    (4.0, -1.0, False, 3.0),
    (4.0, 0.0, False, 0.0),
]


def test_gradients_by_hand():
    ratio, advantages, high, weights = (torch.tensor(column).unsqueeze(0) for column in zip(*TOKENS, strict=True))
    log_prob = ratio.log().requires_grad_()
    mask = torch.ones_like(ratio)
    with ENTROPY_RANK.bound(high.float()):
        loss, metrics = compute_policy_loss_aspo(0 * ratio, log_prob, advantages, mask, "token-sum", actor_config())
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -advantages * weights)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(4 / 13)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(3 / 13)


def slow_gradient(ratio: float, advantage: float, high: bool, c: float) -> float:
    bound = 0.4 if high else 0.2
    if advantage > 0:
        return 0.0 if ratio > 1 + bound else -advantage * min(1 / ratio, c)
    return 0.0 if ratio < 1 - bound else -advantage * min(ratio, c)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_gradients_token_by_token(seed, mode):
    entropy, mask, old, new, advantages = random_batch(seed)
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(9))
    high = entropy_rank(entropy, mask)[0]
    with ENTROPY_RANK.bound(high):
        loss, metrics = compute_policy_loss_aspo(
            old, new, advantages, mask, mode, actor_config(clip_ratio_c=1.7), weights
        )
    loss.backward()
    counts = mask.sum(-1)
    rows = (counts > 0).sum().item()
    scale = {"token-mean": 1 / mask.sum().item(), "token-sum": 1.0, "seq-mean-token-sum": 1 / rows}
    expected = torch.zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        ratio = math.exp(new[i, t].item() - old[i, t].item())
        gradient = slow_gradient(ratio, advantages[i, t].item(), high[i, t].item() > 0.8, 1.7)
        expected[i, t] = weights[i, t] * gradient * scale.get(mode, 1 / rows / counts[i].item())
    torch.testing.assert_close(new.grad, expected, rtol=1e-4, atol=1e-7)
    assert all(map(math.isfinite, metrics.values()))
