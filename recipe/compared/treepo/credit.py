"""TreePO's credit (arXiv 2508.17445, equation 5; `algorithm.adv_estimator=treepo`).

A trajectory's advantage is its outcome minus the mean outcome of a subtree, averaged over all subtrees that hold it and
at least one other trajectory, the prompt's whole tree included. All tokens of the trajectory have this advantage.

    prompt ─┬─┬─ right    the whole tree's mean 3/4, its own subtree's 1/2:  (1/4 + 1/2) / 2 = +0.375
            │ └─ wrong                                                      (-3/4 - 1/2) / 2 = -0.625
            └─┬─ right    3/4 and 1:                                        (1/4 + 0) / 2 = +0.125
              └─ right                                                                      +0.125

Subtrees of the same trajectories count once, however many rounds and tool results lie between their starts. The
published code counts them once for each round. It then whitens over all tokens of the batch, which gives advantages to
groups whose outcomes are equal. Here outcomes are divided by the standard deviation of their group
(`norm_adv_by_std_in_grpo`).
"""

from typing import Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, batch_nodes, node_values, trajectory_advantages
from verl.utils.parts import Compares, register_credit
from verl.workers.config.keys import STRICT


@dataclass(frozen=True, config=STRICT)
class TreePOCreditKeys:
    """Keys under algorithm.treepo.

    Args:
        adv_weight_strategy: weights of the subtrees: `average` for equal ones, `group_size` for their numbers of
            trajectories.
    """

    adv_weight_strategy: Literal["average", "group_size"] = "average"


@register_credit(
    "treepo",
    "TreePO (arXiv 2508.17445): each trajectory against every subtree that it is in, on average",
    compares=Compares.NODES,
    keys=TreePOCreditKeys,
    needs=(SEGMENT_IDS,),
)
def compute_treepo_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool, keys: TreePOCreditKeys
) -> torch.Tensor:
    """Return TreePO's advantages (B, 1)."""
    nodes = batch_nodes(index, mask)
    outcomes = trajectory_advantages(rewards, index, epsilon, norm)  # their mean over the whole tree is 0
    tree_size = nodes.row_group.bincount(minlength=len(nodes.prompts))
    size_above = torch.where(nodes.parent < 0, tree_size[nodes.group], nodes.passing[nodes.parent])
    is_subtree = (nodes.passing > 1) & (nodes.passing < size_above)
    by_size = keys.adv_weight_strategy == "group_size"
    weights = is_subtree * (nodes.passing if by_size else 1)

    def sum_over_path(node_numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum (B,) of the nodes' numbers (N,) over each row's nodes."""
        return node_numbers.new_zeros(len(outcomes)).index_add_(0, nodes.pass_row, node_numbers[nodes.pass_node])

    baselines = sum_over_path(weights * node_values(nodes, outcomes).value)
    total_weights = sum_over_path(weights) + (tree_size[nodes.row_group] if by_size else 1)
    return (outcomes - baselines / total_weights).unsqueeze(-1)
