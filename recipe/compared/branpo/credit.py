"""BranPO's credit (arXiv 2602.03719; `algorithm.adv_estimator=branpo`).

Rows that begin with the same segment have a common base. Tokens that several of them share belong to the base, a row's
other tokens to its tail. A base's value is the mean outcome of its rows, and m the mean value of a prompt's bases:

    token of a base   (value - m) / std of the values; in the first row that has the token, 0 in the others
    token of a tail   (outcome of the row - m) / std of the outcomes, where a row weighs 1 / number of its base's rows;
                      at most 0 if another tail of the base has the same outcome in fewer steps

Each base counts once in m, however many tails it has: failed bases have more tails, so the published code's mean over
tails is lower than the mean outcome of independent trajectories. A tail's steps are its segments by the model. Where
rows share nothing this is GRPO.
"""

import numpy as np
import torch

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, Nodes, batch_nodes, trajectory_advantages, weighted_advantages
from verl.utils.parts import Compares, register_credit


def is_longer(nodes: Nodes, outcomes: torch.Tensor, bases: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (B,) whether another row of the row's base (`bases`) has the same outcome and a tail of fewer steps."""
    own = (nodes.passing == 1) & (nodes.at_first_token(mask) > 0)
    steps = nodes.pass_row.bincount(own[nodes.pass_node].double(), minlength=len(bases))
    rivals = torch.stack([bases.double(), outcomes], dim=1).unique(dim=0, return_inverse=True)[1]
    fewest = torch.full_like(steps, torch.inf).scatter_reduce(0, rivals, steps, "amin")
    return steps > fewest[rivals]


@register_credit(
    "branpo",
    "BranPO (arXiv 2602.03719): what rows share has the mean outcome of its tails, once; a tail has its own outcome, "
    "but no positive advantage where another one is right and shorter",
    compares=Compares.NODES,
    needs=(SEGMENT_IDS,),
)
def compute_branpo_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool
) -> torch.Tensor:
    """Return the advantages (B, T) defined above; without `norm` nothing is divided by a standard deviation."""
    nodes, outcomes = batch_nodes(index, mask), rewards.sum(-1).double()
    first = nodes.token_nodes[:, 0]
    first = torch.where(first < 0, -1 - torch.arange(len(first)), first)  # rows without a node share nothing
    first_nodes, bases, size = first.unique(return_inverse=True, return_counts=True)
    values = torch.zeros_like(first_nodes, dtype=torch.float64).index_add_(0, bases, outcomes) / size
    prompt_of_base = torch.zeros_like(first_nodes).index_copy_(0, bases, nodes.row_group)
    base = trajectory_advantages(values.unsqueeze(-1), prompt_of_base.numpy(), epsilon, norm)[bases]
    tail = weighted_advantages(outcomes, nodes.row_group, 1 / size[bases].double(), epsilon, norm)
    tail = torch.where(is_longer(nodes, outcomes, bases, mask), tail.clamp(max=0), tail)
    first_row = nodes.to_tokens(nodes.first_token // max(mask.shape[1], 1))
    base_tokens = base.unsqueeze(-1) * (first_row == torch.arange(len(bases)).unsqueeze(-1))
    advantages = torch.where(nodes.to_tokens(nodes.passing > 1), base_tokens, tail.unsqueeze(-1))
    return advantages.to(rewards.dtype)
