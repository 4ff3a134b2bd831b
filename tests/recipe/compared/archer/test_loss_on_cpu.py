"""Archer's classes of tokens and its loss by hand, and against slow versions written out token by token."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from recipe.compared.archer.loss import compute_policy_loss_archer
from tests.configs import composed
from tests.recipe import losses
from tests.recipe.losses import assert_token_by_token, random_batch, slow_clipped_loss
from verl.trainer.checks.parts import check_parts
from verl.trainer.ppo.loss.token_losses import ENTROPY_RANK, entropy_rank
from verl.utils.token_fields import REFERENCE_LOG_PROB
from verl.workers.config.prefix_tree import skips_zero_advantages
from verl.workers.utils import field_losses

actor_config = partial(losses.actor_config, "archer")
KL = {"low_entropy_kl_loss_scale_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.0}


def slow_high(entropy, mask, quantile):
    high = torch.zeros(entropy.shape, dtype=torch.bool)
    for i in range(len(entropy)):
        valid = [t for t in range(entropy.shape[1]) if mask[i, t] and math.isfinite(entropy[i, t])]
        values = [entropy[i, t].item() for t in valid]
        for t in valid:
            high[i, t] = bool(entropy[i, t].item() > np.quantile(values, quantile))
    return high


# ---- which tokens have high entropy ----


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("seed", range(5))
def test_a_rank_above_q_is_an_entropy_above_the_linear_q_quantile(seed, quantile):
    entropy, mask, *_ = random_batch(seed, rows=30, length=16)
    entropy[0, 0], mask[0, 0] = math.nan, 1
    high = slow_high(entropy, mask, quantile)
    assert torch.equal(entropy_rank(entropy, mask)[0] > quantile, high) and high.any()


@pytest.mark.parametrize(
    ("entropy", "mask"),
    [
        (torch.tensor([[0.7]]), torch.ones(1, 1)),
        (torch.full((2, 6), 0.7), torch.ones(2, 6)),
        (torch.rand(2, 6), torch.zeros(2, 6)),
        (torch.rand(0, 6), torch.zeros(0, 6)),
        (torch.full((1, 3), math.nan), torch.ones(1, 3)),
    ],
    ids=["one token", "all equal", "all masked", "no rows", "not finite"],
)
def test_no_token_has_high_entropy(entropy, mask):
    ranks, _ = entropy_rank(entropy, mask)
    assert ranks.shape == entropy.shape and not ranks.any()


# ---- the loss ----


@pytest.mark.parametrize("kl", [{}, KL], ids=["without KL", "with KL"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_token_by_token(seed, kl):
    config = actor_config(
        low_entropy_clip_ratio_low=0.1,
        low_entropy_clip_ratio_high=0.3,
        high_entropy_clip_ratio_low=0.4,
        high_entropy_clip_ratio_high=0.6,
        clip_ratio_c=2.0,
        token_entropy_quantile=0.6,
        **kl,
    )
    entropy, mask, old, new, advantages = random_batch(seed)
    reference = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(seed))
    high = slow_high(entropy, mask, 0.6)
    with ENTROPY_RANK.bound(entropy_rank(entropy, mask)[0]), REFERENCE_LOG_PROB.bound(reference):
        loss, metrics = compute_policy_loss_archer(old, new, advantages, mask, "token-mean", config)

    def slow_token_loss(log_prob, i, t):
        low, up = (0.4, 0.6) if high[i, t] else (0.1, 0.3)
        distance = reference[i, t] - log_prob
        kl = 0.0 if high[i, t] else config.low_entropy_kl_loss_scale_coef * (distance.exp() - distance - 1)
        return slow_clipped_loss(log_prob, old[i, t], advantages[i, t].item(), low, up, config) + kl

    assert_token_by_token(loss, new, mask, slow_token_loss)
    assert metrics["actor/archer/high_entropy_share"] == pytest.approx((high.sum() / mask.sum()).item())
    assert ("actor/archer/low_entropy_kl" in metrics) == bool(kl) and all(map(math.isfinite, metrics.values()))


# ---- in a run ----


def test_the_reference_policys_log_probs_reach_the_loss(monkeypatch):
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    columns = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name in ("entropy_rank", "other")}
    seen = []
    monkeypatch.setattr(field_losses, "ppo_loss", lambda *_: seen.append(REFERENCE_LOG_PROB.get_optional()))
    for reference in ({}, {"ref_log_prob": columns["other"]}):
        data = TensorDict({**columns, **reference}, batch_size=[2])
        field_losses.ppo_loss_with_fields(None, None, data, fields=["entropy_rank"])
    assert seen[0] is None and seen[1].tolist() == [[-1.0, -2.0], [-3.0, 0.0]]


def test_a_kl_without_a_reference_policy_is_refused():
    for changes in ({"use_kl_loss": False}, {"kl_loss_coef": 0.001}):
        with pytest.raises(
            ValueError, match="low_entropy_kl_loss_scale_coef=0.1 with .*: set .*use_kl_loss=true, which"
        ):
            keys = [f"actor_rollout_ref.actor.{key}={value}" for key, value in {**KL, **changes}.items()]
            check_parts(composed("explore", "hardware=cpu", "loss=archer", *keys))


def test_rows_without_advantages_are_computed_if_there_is_a_kl():
    section = composed("explore", "hardware=cpu", "loss=archer", "update=tree").actor_rollout_ref.actor
    assert not skips_zero_advantages(section)
    section.use_kl_loss = False
    assert skips_zero_advantages(section)
