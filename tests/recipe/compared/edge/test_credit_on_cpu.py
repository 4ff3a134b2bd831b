"""EDGE-GRPO's advantage against a slow version, and its entropies' boundary cases."""

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn

from recipe.compared.edge.credit import ENTROPY_FACTOR, entropy_factors


def advantage(rewards, mask, index, entropy, **config) -> torch.Tensor:
    factors, _ = ENTROPY_FACTOR.compute(entropy, mask.bool())
    with ENTROPY_FACTOR.bound(factors):
        return get_adv_estimator_fn("edge")(rewards, mask, np.array(index, dtype=object), config=config)[0]


@pytest.mark.parametrize("seed", range(3))
def test_against_a_slow_version(seed):
    generator = np.random.default_rng(seed)
    index = generator.integers(0, 4, 20)
    mask = torch.from_numpy(generator.integers(0, 2, (20, 6))).float()
    mask[:, 0] = 1
    entropy = torch.from_numpy(generator.exponential(2.0, (20, 6)))
    rewards = torch.zeros(20, 6)
    rewards[:, -1] = torch.from_numpy(generator.random(20))
    grpo, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    own = [np.mean([entropy[i, t].item() for t in range(6) if mask[i, t]]) for i in range(20)]
    # upstream gives a prompt's only response its score
    alone = [list(index).count(i) == 1 for i in index]
    factors = np.mean(own) / np.array(own)
    expected = torch.stack([grpo[i] * (0.0 if alone[i] else factors[i]) for i in range(20)])
    torch.testing.assert_close(advantage(rewards, mask, index, entropy), expected, rtol=1e-4, atol=1e-5)


def test_certain_responses_and_the_clamp():
    entropy, mask = torch.tensor([[0.0], [2.0], [torch.inf], [5.0]]), torch.tensor([[1.0], [1], [1], [0]])
    rewards = torch.tensor([[1.0], [0], [0.5], [0]])
    batch = rewards, mask, ["p", "p", "p", "pad"], entropy
    values = advantage(*batch, norm_adv_by_std_in_grpo=False)
    mean = (1e-6 + 2.0) / 2
    torch.testing.assert_close(values, torch.tensor([[0.5 * mean / 1e-6], [-0.5 * mean / 2], [0], [0]]))
    clamped = advantage(*batch, norm_adv_by_std_in_grpo=False, edge={"clamp": True})
    torch.testing.assert_close(clamped, torch.tensor([[0.5 * 10], [-0.5 * mean / 2], [0], [0]]))
    assert entropy_factors(entropy, mask.bool())[0].flatten().tolist()[2:] == [1, 0]
