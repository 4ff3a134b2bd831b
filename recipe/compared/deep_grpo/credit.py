"""DEEP-GRPO's credit (arXiv 2602.14169; `algorithm.adv_estimator=deep_grpo`).

An advantage is a trajectory's outcome minus a mean outcome, over the prompt's main trajectories for a main one, or over
its pivot's branches for a branch. Nothing is divided by a standard deviation, and a branch trains only its own tokens.

The paper's loss is a token mean over main trajectories plus lambda times one over branches. Here the loss is one token
mean over n tokens, so that advantages of main trajectories are multiplied by n / n_main, and those of branches by
lambda n / n_branches, all counted over the batch; with several mini-batches the paper's means are met on average. The
published code drops rows whose advantage is 0, and with them their KL term; here they stay.
"""

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from recipe.compared.deep_grpo.tree import PIVOTS
from verl.trainer.ppo.credit.nodes import trajectory_advantages
from verl.utils.parts import Compares, register_credit
from verl.workers.config.keys import STRICT


@dataclass(frozen=True, config=STRICT)
class DeepGRPOCreditKeys:
    """Keys under algorithm.deep_grpo.

    Args:
        branch_weight: weight of the branches' mean, the paper's lambda; the main trajectories' mean has weight 1.
    """

    branch_weight: float = Field(default=1.0, ge=0)


@register_credit(
    "deep_grpo",
    "DEEP-GRPO (arXiv 2602.14169): main trajectories among themselves, branches among those of their pivot, each with "
    "a token mean of its own; with other trees every trajectory is a main one",
    keys=DeepGRPOCreditKeys,
    compares=Compares.NODES,
    needs=(PIVOTS,),
)
def compute_deep_grpo_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool, keys: DeepGRPOCreditKeys
) -> torch.Tensor:
    """Return advantages (B, T), scaled so that their token mean over the batch is the sum of the paper's two means.
    `PIVOTS` holds 0 at all tokens of a main trajectory. `norm` has no effect."""
    pivots = PIVOTS.get()
    row_pivot = pivots.amax(dim=1)
    prompts = torch.from_numpy(np.unique(index, return_inverse=True)[1])
    groups = prompts * (1 + row_pivot.max()) + row_pivot
    advantages = trajectory_advantages(rewards, groups.numpy(), epsilon, norm_adv_by_std_in_grpo=False)
    main = mask * (row_pivot == 0).unsqueeze(-1)
    branches = mask * (pivots > 0)
    weights = main / main.sum().clamp(min=1) + keys.branch_weight * branches / branches.sum().clamp(min=1)
    return advantages.unsqueeze(-1) * weights * mask.sum()
