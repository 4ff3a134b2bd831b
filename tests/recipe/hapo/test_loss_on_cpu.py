"""HAPO's formulas against slow versions written out token by token, and on every degenerate batch."""

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from recipe.hapo.credit import compute_hapo_outcome_advantage
from recipe.hapo.loss import compute_policy_loss_hapo
from recipe.hapo.normalized_entropy import ENTROPY_H, compute_entropy_h
from tests.recipe.losses import actor_config, assert_token_by_token, random_batch, slow_clipped_loss
from vllm_patches.entropy_temperature import normalize_entropy

# ---- h ----


def slow_h(entropy, mask, pivot):
    """The paper's formula, one token after the other in plain Python; (h, statistics)."""
    xs = sorted(math.log(max(e, 1e-6)) for e in entropy[mask.bool()].tolist())
    median = xs[round(pivot * (len(xs) - 1))]
    std = math.sqrt(sum((x - median) ** 2 for x in xs) / len(xs))
    top, bottom = (max(xs) - median) / std, (min(xs) - median) / std
    h = torch.zeros_like(entropy)
    for i in range(len(entropy)):
        for t in range(entropy.shape[1]):
            if mask[i, t]:
                z = (math.log(max(entropy[i, t].item(), 1e-6)) - median) / std
                h[i, t] = z / top if z > 0 else z / abs(bottom)
    return h, (median, std, 1 / top, 1 / abs(bottom))


@pytest.mark.parametrize("pivot", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(5))
def test_h_is_the_papers_formula(seed, pivot):
    entropy, mask, *_ = random_batch(seed)
    h, statistics = compute_entropy_h(entropy, mask, pivot)
    expected, numbers = slow_h(entropy, mask, pivot)
    torch.testing.assert_close(h, expected, rtol=1e-4, atol=1e-5)
    assert list(statistics) == pytest.approx(numbers, rel=1e-4)


def test_statistics_of_one_batch_bound_h_of_another():
    _, statistics = compute_entropy_h(*random_batch(1)[:2])
    h = normalize_entropy(torch.tensor([0.0, 1e-30, 100.0, math.exp(statistics.median)]), *statistics)
    assert h.tolist() == pytest.approx([-1.0, -1.0, 1.0, 0.0], abs=1e-5)


@pytest.mark.parametrize(
    ("entropy", "mask"),
    [
        (torch.rand(3, 4), torch.zeros(3, 4)),
        (torch.zeros(0, 4), torch.zeros(0, 4)),
        (torch.full((2, 3), 0.7), torch.ones(2, 3)),
        (torch.zeros(2, 3), torch.ones(2, 3)),
        (torch.rand(1, 1), torch.ones(1, 1)),
        (torch.tensor([[0.5, math.nan], [0.5, math.inf]]), torch.tensor([[1, 0], [1, 0]])),
    ],
    ids=["all masked", "no rows", "all equal", "all certain", "one token", "nan outside the mask"],
)
def test_degenerate_batches_have_h_zero(entropy, mask):
    h, statistics = compute_entropy_h(entropy, mask)
    assert h.shape == entropy.shape and (h == 0).all()
    assert all(math.isfinite(value) for value in statistics)
    assert min(statistics.std, statistics.scale_pos, statistics.scale_neg) > 0


def test_more_tokens_than_torch_quantile_takes():
    entropy = torch.linspace(0.1, 1.0, 2**24 + 1000).reshape(1, -1)
    _, statistics = compute_entropy_h(entropy, torch.ones_like(entropy, dtype=torch.bool), 0.5)
    assert math.exp(statistics.median) == pytest.approx(0.55, rel=1e-3)


# ---- clip ranges, advantages ----


def slow_group_advantage(scores, lengths, groups, norm):
    """Every token of a group in a list."""
    out = []
    for i, group in enumerate(groups):
        members = [j for j, g in enumerate(groups) if g == group]

        def value(j, members=members):
            tokens = [scores[k] for k in members for _ in range(lengths[k])]
            if not tokens:
                return scores[j] / 1e-6 if norm else scores[j]
            std = np.std(tokens) if norm else 0
            return (scores[j] - np.mean(tokens)) / (std + 1e-6) if norm else scores[j] - np.mean(tokens)

        if any(abs(value(j)) >= 5 and lengths[j] for j in members):
            of_group = np.array([scores[j] for j in members])
            centered = scores[i] - of_group.mean()
            out.append(centered / (of_group.std(ddof=1) + 1e-6) if norm else centered)
        else:
            out.append(value(i))
    return out


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_group_advantage_is_the_papers_formula(seed, norm):
    generator = np.random.default_rng(seed)
    groups = generator.permutation(np.repeat(np.arange(5), 4))
    scores, lengths = generator.integers(0, 2, 20).astype(float), generator.integers(1, 60, 20)
    rewards, mask = torch.zeros(20, 60, dtype=torch.float64), torch.arange(60) < torch.tensor(lengths)[:, None]
    rewards[:, 0] = torch.tensor(scores)
    advantages, _ = compute_hapo_outcome_advantage(rewards, mask, groups, config={"norm_adv_by_std_in_grpo": norm})
    assert advantages[:, 0].tolist() == pytest.approx(slow_group_advantage(scores, lengths, groups, norm), rel=1e-6)


def test_a_rare_short_success_falls_back_to_grpo():
    """One right answer of 1 token among wrong ones of 1000: token-level z-score sqrt(7000) = 83."""
    rewards, mask = torch.zeros(8, 1000), torch.ones(8, 1000)
    mask[0, 1:] = 0
    rewards[0, 0] = 1.0
    index = np.array(["a"] * 8, dtype=object)
    advantages, returns = compute_hapo_outcome_advantage(rewards, mask, index)
    grpo, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    torch.testing.assert_close(advantages, grpo)
    assert returns is advantages and (advantages[0, 1:] == 0).all()


def test_the_algorithm_config_says_whether_to_divide_by_the_deviation():
    """Upstream hands a registered estimator its config, not the key."""
    rewards, index = torch.tensor([[2.0], [0.0]]), np.array(["a", "a"])
    for norm, expected in ((True, [1.0, -1.0]), (False, [3.0, -3.0])):
        config = {"norm_adv_by_std_in_grpo": norm}
        advantages, _ = compute_hapo_outcome_advantage(3 * rewards, torch.ones(2, 1), index, config=config)
        assert advantages.flatten().tolist() == pytest.approx(expected, rel=1e-5)


# ---- the loss ----


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("advantage", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_token_by_token(seed, clip, advantage):
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    config = actor_config("hapo", adaptive_clip=clip, adaptive_advantage=advantage, **bounds)
    entropy, mask, old, new, advantages = random_batch(seed)
    h, _ = compute_entropy_h(entropy, mask)
    with ENTROPY_H.bound(h):
        loss, metrics = compute_policy_loss_hapo(old, new, advantages, mask, "token-mean", config)

    def slow_token_loss(log_prob, i, t):
        low, high, own = 0.2, 0.28, advantages[i, t].item()
        low *= 1 - config.clip_alpha * h[i, t].item() * (clip and h[i, t] <= 0)
        high *= 1 + config.clip_alpha * h[i, t].item() * (clip and h[i, t] > 0)
        if advantage:
            inside = 1 - low / 2 < (log_prob - old[i, t]).exp() < 1 + high / 2
            if inside == (h[i, t] <= 0):
                own *= 1 + config.adv_beta * h[i, t].item()
        return slow_clipped_loss(log_prob, old[i, t], own, low, high, config)

    assert_token_by_token(loss, new, mask, slow_token_loss)
    assert all(math.isfinite(value) for value in metrics.values())


def test_entropies_that_are_not_finite_do_not_count():
    """Upstream's entropy is NaN where a logit is -inf."""
    entropy = torch.tensor([[0.5, math.nan, 2.0], [math.inf, 0.1, 1.0]])
    h, statistics = compute_entropy_h(entropy, torch.ones(2, 3), 0.5)
    finite, expected = compute_entropy_h(torch.tensor([[0.5, 2.0, 0.1, 1.0]]), torch.ones(1, 4), 0.5)
    assert statistics == expected and h[entropy.isfinite()].tolist() == finite[0].tolist()
    assert h[0, 1] == 0 and h[1, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, 1e-7, 0.0])
def test_equal_scores_have_advantage_0(dtype, reward):
    """The float32 mean of 16 times 0.9 is not 0.9: this rounding error over a standard deviation of 0 gave -0.107."""
    mask = torch.ones(16, 16).tril()  # 1 to 16 tokens
    rewards = torch.zeros(16, 16, dtype=dtype)
    rewards[:, 0] = reward
    advantages, _ = compute_hapo_outcome_advantage(rewards, mask, np.zeros(16))
    assert advantages.eq(0).all()
