"""AEPO's formulas by hand, against slow versions written out token by token, and on degenerate batches."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from recipe.arpo.loss import (
    STANDARDIZED_ENTROPY,
    compute_policy_loss_aepo,
    entropy_balanced_advantage,
    standardize_entropy,
)
from tests.recipe import losses
from tests.recipe.losses import assert_token_by_token, random_batch

actor_config = partial(losses.actor_config, "aepo", clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28)


@pytest.mark.parametrize("seed", range(3))
def test_entropy_is_standardized_over_the_valid_tokens(seed):
    entropy, mask, *_ = random_batch(seed)
    standardized, metrics = standardize_entropy(entropy, mask)
    values = entropy[mask.bool()].tolist()
    mean, std = np.mean(values), np.std(values)
    grew = np.mean([v > mean for v in values])
    assert [*metrics.values()] == pytest.approx([mean, std, grew], rel=1e-6)
    assert standardized[mask.bool()].tolist() == pytest.approx([(v - mean) / std for v in values], abs=1e-5)
    assert (standardized[mask == 0] == 0).all()


@pytest.mark.parametrize(
    ("entropy", "mask", "mean"),
    [
        (torch.rand(3, 4), torch.zeros(3, 4), 0.0),
        (torch.zeros(0, 4), torch.zeros(0, 4), 0.0),
        (torch.full((2, 3), 0.7), torch.ones(2, 3), 0.7),
        (torch.tensor([[0.5, math.nan], [0.5, math.inf]]), torch.tensor([[1, 0], [1, 0]]), 0.5),
    ],
    ids=["all masked", "no rows", "all equal", "nan outside the mask"],
)
def test_entropies_that_do_not_differ_change_nothing(entropy, mask, mean):
    standardized, metrics = standardize_entropy(entropy, mask)
    assert standardized.shape == entropy.shape and (standardized == 0).all()
    assert metrics["aepo/entropy_mean"] == pytest.approx(mean) and metrics["aepo/entropy_std"] < 1e-6


def test_the_balanced_advantage_by_hand():
    z = torch.tensor([-1.0, 0.0, 2.0, -7.0], requires_grad=True)
    advantages = torch.tensor([2.0, -1.0, -1.0, 3.0], requires_grad=True)
    balanced = entropy_balanced_advantage(advantages, z)
    assert balanced.tolist() == pytest.approx([1.6, -1.0, -1.4, 0.0])  # never turned round
    balanced.sum().backward()
    assert z.grad is None and advantages.grad.tolist() == pytest.approx([0.8, 1.0, 1.4, 0.0])


#   ratio, advantage, gradient of the token's loss with respect to its log-probability: PPO's, AEPO's
TOKENS = [
    (2.0, 1.5, 0.0, -1.5 * 1.28),  # above the upper clip, wanted: the one that AEPO keeps alive
    (1.1, 1.5, -1.5 * 1.1, -1.5 * 1.1),  # inside
    (0.5, 1.5, -1.5 * 0.5, -1.5 * 0.5),  # below the lower clip, wanted: PPO does not clip it
    (2.0, -1.0, 2.0, 2.0),  # above, not wanted: PPO does not clip it
    (0.5, -1.0, 0.0, 0.0),  # below, not wanted: the lower clip stays
    (12.0, -1.0, 0.0, 0.0),  # dual clip at 10 stays
    (2.0, 0.0, 0.0, 0.0),
]


def test_balanced_clipping_keeps_the_gradient_above_the_upper_clip():
    ratio, advantages, of_ppo, of_aepo = (torch.tensor(column).unsqueeze(0) for column in zip(*TOKENS, strict=True))
    mask = torch.ones_like(ratio)
    for switch, expected in ((False, of_ppo), (True, of_aepo)):
        log_prob = ratio.log().requires_grad_()
        config = actor_config(enable_entropy_balanced_clipping=switch)
        loss, metrics = compute_policy_loss_aepo(
            torch.zeros_like(ratio), log_prob, advantages, mask, "token-sum", config
        )
        loss.backward()
        torch.testing.assert_close(log_prob.grad, expected)
        values = [max(-a * r, -a * min(max(r, 0.8), 1.28)) for r, a, *_ in TOKENS]
        values[5] = 10.0
        assert loss.item() == pytest.approx(sum(values))
        assert metrics.get("actor/aepo/kept_alive") == (pytest.approx(1 / 7) if switch else None)


def slow_token_loss(log_prob, old, advantage, z, config):
    """A token's loss, autograd's own operations only; log_prob is a scalar tensor."""
    if config.enable_entropy_balanced_advantage:
        advantage *= max(0.0, 1 + config.entropy_advantage_coef * z)
    ratio = (log_prob - old).exp()
    upper = ratio.new_tensor(1 + config.clip_ratio_high)
    if config.enable_entropy_balanced_clipping:
        upper = upper * ratio / ratio.detach()
    clipped = upper if ratio > upper else torch.clamp(ratio, min=1 - config.clip_ratio_low)
    loss = -advantage * ratio if -advantage * ratio >= -advantage * clipped else -advantage * clipped
    worst = ratio.new_tensor(-advantage * config.clip_ratio_c)
    return worst if advantage < 0 and loss > worst else loss


@pytest.mark.parametrize("clipping", [True, False])
@pytest.mark.parametrize("advantage", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_loss_and_its_gradient_token_by_token(seed, clipping, advantage):
    switches = {"enable_entropy_balanced_clipping": clipping, "enable_entropy_balanced_advantage": advantage}
    config = actor_config(**switches, entropy_advantage_coef=0.5, clip_ratio_c=3.0)
    entropy, mask, old, new, advantages = random_batch(seed)
    z, *_ = standardize_entropy(entropy, mask)
    with STANDARDIZED_ENTROPY.bound(z):
        loss, metrics = compute_policy_loss_aepo(old, new, advantages, mask, "token-mean", config)

    def of_token(log_prob, i, t):
        return slow_token_loss(log_prob, old[i, t], advantages[i, t].item(), z[i, t].item(), config)

    assert_token_by_token(loss, new, mask, of_token)
    assert all(math.isfinite(value) for value in metrics.values())


def test_entropies_that_are_not_finite_do_not_count():
    """Upstream's entropy is NaN where a logit is -inf."""
    entropy = torch.tensor([[0.5, math.nan, 2.0], [math.inf, 0.1, 1.0]])
    standardized, metrics = standardize_entropy(entropy, torch.ones(2, 3))
    finite, expected = standardize_entropy(torch.tensor([[0.5, 2.0, 0.1, 1.0]]), torch.ones(1, 4))
    assert metrics["aepo/entropy_std"] == expected["aepo/entropy_std"]
    assert standardized[entropy.isfinite()].tolist() == finite[0].tolist()
    assert standardized[0, 1] == 0 and standardized[1, 0] == 0
