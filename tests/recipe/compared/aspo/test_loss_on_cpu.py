"""ASPO's gradients against a slow version that writes each token's gradient down."""

import math
from functools import partial

import pytest
import torch

from recipe.compared.aspo.loss import compute_policy_loss_aspo
from tests.recipe import losses
from tests.recipe.losses import random_batch
from verl.trainer.ppo.loss.token_losses import ENTROPY_RANK, entropy_rank

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]


HIGH = {"high_entropy_clip_ratio_low": 0.4, "high_entropy_clip_ratio_high": 0.4}
actor_config = partial(losses.actor_config, "aspo", clip_ratio_c=3.0, **HIGH)


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
    expected, clipped, bounded = torch.zeros(mask.shape), 0, 0
    for i, t in mask.nonzero().tolist():
        ratio = math.exp(new[i, t].item() - old[i, t].item())
        gradient = slow_gradient(ratio, advantages[i, t].item(), high[i, t].item() > 0.8, 1.7)
        clipped += gradient == 0
        bounded += (1 / ratio if advantages[i, t] > 0 else ratio) > 1.7
        expected[i, t] = weights[i, t] * gradient * scale.get(mode, 1 / rows / counts[i].item())
    torch.testing.assert_close(new.grad, expected, rtol=1e-4, atol=1e-7)
    assert all(map(math.isfinite, metrics.values())) and clipped and bounded
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped / mask.sum().item())
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(bounded / mask.sum().item())
