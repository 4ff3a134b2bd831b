"""Pass@k training (arXiv 2508.10751, its analytical form; `algorithm.adv_estimator=passk`).

k responses are rewarded by the best of them. Of a prompt's N responses c are right; over all choices of k of them the
reward has the mean rho and the standard deviation sigma, and a response has the mean advantage of its choices:

    rho = 1 - C(N-c, k) / C(N, k)      sigma = sqrt(rho (1 - rho))
    right    (1 - rho) / sigma
    wrong    (1 - rho - C(N-c-1, k-1) / C(N-1, k-1)) / sigma
    N 4, k 2, c 1  ->  1, -1/3, -1/3, -1/3

All are 0 where every choice has the same reward: no response is right, or fewer than k are wrong.

Differences from the authors' function, which has no default of k: c is counted in the reward function's `acc`, not in
the score, which penalties change. Another `acc` than 0 or 1 is refused; theirs returns it as the advantage. k above
`rollout.n` is refused; theirs divides 0 by 0. Responses that share tokens are not independent, which biases rho.
Upstream's `grpo_passk` is another estimator, in which only the best response has an advantage.
"""

from math import comb, sqrt

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.parts import Compares, register_credit
from verl.utils.token_fields import RewardField
from verl.workers.config.keys import ROLLOUT, STRICT

ACCURACY = RewardField("acc", "algorithm.adv_estimator=passk")


@dataclass(frozen=True, config=STRICT)
class PassKKeys:
    """Keys under algorithm.passk.

    Args:
        k: number of responses of which one has to be right; at most `rollout.n`.
    """

    k: int = Field(default=4, ge=1)

    def check(self, config) -> None:
        """Raise ValueError if a prompt has fewer than k responses, or a KL penalty is asked for in the rewards."""
        if self.k > (n := config.actor_rollout_ref.rollout.n):
            raise ValueError(f"algorithm.passk.k={self.k}: {ROLLOUT}.n={n} responses are fewer; raise n, or lower k")
        environment = config.actor_rollout_ref.rollout.get("environment")
        if environment in ("gym", "agent") and config.environment.get("reward") != "task":
            raise ValueError(
                f"algorithm.adv_estimator=passk counts right responses by the reward function's acc, and with "
                f"environment={environment} no reward function is called: set environment.reward=task"
            )
        if config.algorithm.use_kl_in_reward:
            raise ValueError(
                "algorithm.use_kl_in_reward=true has no effect on algorithm.adv_estimator=passk, which counts right "
                "responses; use actor.use_kl_loss"
            )


def passk_advantages(n: int, n_right: int, k: int, epsilon: float = 0.0) -> tuple[float, float]:
    """Return the advantage of a right and of a wrong response among n, of which `n_right` are right."""
    n_wrong = n - n_right
    if n_right == 0 or n_wrong < k:
        return 0.0, 0.0
    fails = comb(n_wrong, k) / comb(n, k)
    std = sqrt(fails * (1 - fails)) + epsilon
    return fails / std, (fails - comb(n_wrong - 1, k - 1) / comb(n - 1, k - 1)) / std


def _warning(config) -> str:
    if config.actor_rollout_ref.rollout.get("tree") in (None, "plain"):
        return ""
    return "responses that share tokens are not independent, which biases the number of right ones among k"


# Equal scores do not make a group equal: they may belong to right and to wrong responses.
@register_credit(
    "passk",
    "Pass@k training (arXiv 2508.10751): each response's mean advantage over all choices of k responses of its prompt, "
    "of which the best counts",
    keys=PassKKeys,
    smallest={"k": 2},
    compares=Compares.GROUP_THEN_MORE,
    reward_fields=(ACCURACY,),
    warning=_warning,
)
def compute_passk_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool, keys: PassKKeys
) -> torch.Tensor:
    """Return the advantages (B, 1); `norm` has no effect. Raise ValueError for an `acc` that is neither 0 nor 1."""
    accuracy = ACCURACY.get()
    advantages = torch.zeros(len(index), 1)
    prompts, numbers = np.unique(index, return_inverse=True)
    rows_of = np.split(numbers.argsort(kind="stable"), np.bincount(numbers).cumsum()[:-1])
    for prompt, rows in zip(prompts, rows_of, strict=True):
        if not mask[rows].any():  # padding rows
            continue
        if wrong_values := [value for value in accuracy[rows].tolist() if value not in (0, 1)]:
            raise ValueError(
                f"the reward function returned acc={wrong_values[0]} for a response to the prompt {prompt}: "
                "algorithm.adv_estimator=passk counts right responses, so return 0 or 1 under acc beside the score"
            )
        is_right = accuracy[rows] == 1
        right, wrong = passk_advantages(len(rows), int(is_right.sum()), keys.k, epsilon)
        advantages[rows, 0] = torch.where(is_right, right, wrong).float()
    return advantages
