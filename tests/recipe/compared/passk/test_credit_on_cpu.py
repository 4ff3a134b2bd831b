"""The Pass@k advantage by hand, against all choices of k responses, and where it has nothing to compare."""

from itertools import combinations

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from recipe.compared.passk.credit import ACCURACY
from tests.configs import composed
from verl.trainer.checks.parts import check_parts


def advantage(accuracy: list, k: int, index=None) -> torch.Tensor:
    """Return the advantages of responses with two tokens each; their rewards are equal and tell nothing."""
    mask = torch.ones(len(accuracy), 2)
    rewards = torch.full(mask.shape, 0.3)
    index = np.array(["p"] * len(accuracy) if index is None else index, dtype=object)
    with ACCURACY.bound(torch.tensor(accuracy, dtype=torch.float64)):
        return get_adv_estimator_fn("passk")(rewards, mask, index, config={"passk": {"k": k}})[0]


@pytest.mark.parametrize("seed", range(6))
def test_against_all_choices_of_k_responses(seed):
    """A response's advantage is the mean over the choices with it of (best - mean) / standard deviation."""
    generator = np.random.default_rng(seed)
    index, accuracy = generator.integers(0, 4, 28), generator.integers(0, 2, 28)
    accuracy[index == 0] = 0
    k = int(generator.integers(1, 5))
    fast = advantage(accuracy.tolist(), k, index.tolist())
    for prompt in range(4):
        rows = np.flatnonzero(index == prompt)
        choices = list(combinations(rows, k))
        best = np.array([accuracy[list(choice)].max() for choice in choices])
        differ = len(set(best)) > 1
        for row in rows:
            own = [value for value, choice in zip(best, choices, strict=True) if row in choice]
            expected = (np.mean(own) - best.mean()) / best.std() if differ else 0.0
            assert fast[row].tolist() == pytest.approx([expected] * 2, abs=1e-4)
        assert fast[rows, 0].sum().item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("accuracy, k", [([0, 0, 0], 2), ([1, 1, 0], 2), ([1, 1, 1], 1), ([1, 0], 3), ([1], 1)])
def test_all_choices_are_equal(accuracy, k):
    """No response is right, fewer than k are wrong, or the prompt has fewer than k responses."""
    assert not advantage(accuracy, k).any()


@pytest.mark.parametrize("value", [0.5, 2, -1, torch.nan])
def test_another_accuracy_is_refused_with_the_prompt(value):
    with pytest.raises(ValueError, match=f"returned acc={float(value)} for a response to the prompt q: .* 0 or 1"):
        advantage([1, 0, value, 0], 2, ["p", "p", "q", "q"])


def test_a_kl_in_the_reward_is_refused():
    config = composed("explore", "hardware=cpu", "credit=passk", "actor_rollout_ref.rollout.n=4")
    assert config.algorithm.passk.k == 4
    config.algorithm.use_kl_in_reward = True
    with pytest.raises(ValueError, match="use_kl_in_reward=true has no effect on algorithm.adv_estimator=passk"):
        check_parts(config)
