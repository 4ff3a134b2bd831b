"""EDGE-GRPO's entropy-driven advantage (arXiv 2507.21848; `algorithm.adv_estimator=edge`).

GRPO's advantage of a response, times the mean of all responses' entropies over the response's own: a sure right
response gains more, and a sure wrong one loses more.

    A'_i = A_i mean(P) / P_i      P_i  mean entropy in nats of response i's tokens under the old policy
    P [1, 3], A [1, -1]  ->  [2, -2/3]

Differences from the authors' code: P is over the tokens of the mask, theirs over padding too. It has no gradient, while
theirs also lowers the entropy of right and raises that of wrong responses. mean(P) is over the step's responses, not
over a micro-batch, so that no advantage depends on how the batch is cut. P is at least 1e-6, and `clamp` keeps
mean(P) / P_i within [0.1, 10]; theirs has no limit where P is near 0. The standard deviation has the trainer's epsilon
(1e-6), theirs 1e-4. The paper's guided error correction, which trains on given answers as if they were sampled, is not
built.
"""

import numpy as np
import torch
from pydantic.dataclasses import dataclass

from verl.trainer.ppo.credit.nodes import trajectory_advantages
from verl.utils.parts import Compares, register_credit
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT

MIN_ENTROPY = 1e-6
CLAMP = 0.1, 10.0


@dataclass(frozen=True, config=STRICT)
class EdgeKeys:
    """Keys under algorithm.edge.

    Args:
        clamp: whether to keep the factor of an advantage within [0.1, 10].
    """

    clamp: bool = False


def entropy_factors(entropy: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Return mean(P) / P_i (B, T) at the tokens of the mask, 0 elsewhere, and no metrics. Tokens whose entropy is not
    finite do not count; a response without tokens that count has the factor 1."""
    valid = mask & entropy.isfinite()
    n_tokens = valid.sum(-1)
    has_tokens = n_tokens > 0
    sums = torch.where(valid, entropy, 0.0).double().sum(-1)
    own = (sums / n_tokens.clamp(min=1)).clamp(min=MIN_ENTROPY)
    if not has_tokens.any():
        return mask.float(), {}
    factors = torch.where(has_tokens, own[has_tokens].mean() / own, 1.0)
    return factors.float().unsqueeze(-1) * mask, {}


ENTROPY_FACTOR = TokenField("edge_factor", "algorithm.adv_estimator=edge", compute=entropy_factors)


@register_credit(
    "edge",
    "EDGE-GRPO's entropy-driven advantage (arXiv 2507.21848): GRPO's, times the responses' mean entropy over the "
    "response's own",
    keys=EdgeKeys,
    compares=Compares.GROUP,
    needs=(ENTROPY_FACTOR,),
)
def compute_edge_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool, keys: EdgeKeys
) -> torch.Tensor:
    """Return the advantages (B, T); each row of a tree has the factor of its own tokens, also at shared ones."""
    factors = ENTROPY_FACTOR.get()
    if keys.clamp:
        factors = factors.clamp(*CLAMP)
    return trajectory_advantages(rewards, index, epsilon, norm).unsqueeze(-1) * factors
