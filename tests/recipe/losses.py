"""The config of an actor, random rows, and PPO's clipped loss of a token, for tests of losses."""

import pytest
import torch

from verl.workers.config import PolicyLossConfig
from verl.workers.config.explore import ExploreActorConfig


def actor_config(loss_mode: str, **changes) -> ExploreActorConfig:
    values = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio_c": 10.0, **changes}
    return ExploreActorConfig(**values, policy_loss=PolicyLossConfig(loss_mode=loss_mode))


def random_batch(seed: int, rows: int = 10, length: int = 12, spread: float = 0.7):
    """Entropies with ties, as rows that share tokens have; a mask with tool tokens and an empty row; log-probs;
    advantages of tokens. All (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    entropy = (torch.rand(rows, length, generator=generator) * 20).round() / 8
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask &= torch.rand(rows, length, generator=generator) > 0.2
    mask[rows // 2] = False
    old = -torch.rand(mask.shape, generator=generator) * 3
    new = (old + spread * torch.randn(mask.shape, generator=generator)).requires_grad_()
    return entropy, mask.long(), old, new, torch.randn(mask.shape, generator=generator) * mask


def slow_clipped_loss(log_prob, old, advantage: float, low: float, high: float, config):
    """PPO's loss of a token with dual clip, autograd's own operations only; `log_prob` is a scalar tensor."""
    ratio = (log_prob - old).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return torch.minimum(loss, ratio.new_tensor(-advantage * config.clip_ratio_c)) if advantage < 0 else loss


def assert_token_by_token(loss, new, tokens, slow_token_loss, count=None) -> None:
    """The loss and its gradient by `new` are those of `slow_token_loss(log_prob, i, t)`, summed, over `count`."""
    slow = new.detach().clone().requires_grad_()
    terms = [slow_token_loss(slow[i, t], i, t) for i, t in tokens.nonzero().tolist()]
    expected = torch.stack(terms).sum() / (count or len(terms))
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    torch.testing.assert_close(new.grad, slow.grad, rtol=1e-4, atol=1e-6)
