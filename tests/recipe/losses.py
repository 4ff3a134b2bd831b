"""The config of an actor and random rows, for tests of losses."""

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
