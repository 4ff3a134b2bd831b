"""CURE's credit (arXiv 2508.11016, first stage; `algorithm.adv_estimator=cure`).

All trajectories of a prompt are one group of GRPO. Tokens that several of them share are trained in the first one
alone, which is the response that the others continue; in these they have advantage 0.

    response       1 2 3 4 5   right: +0.5 for all tokens (mean only)
    continuation   1 2 3 6 7   wrong:  0 for 1 2 3, and -0.5 for 6 7

The published code hides the shared tokens in the prompt. Here they are part of the response, so that they count in the
loss's mean over tokens.
"""

import numpy as np
import torch

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, batch_nodes, trajectory_advantages
from verl.utils.parts import Compares, register_credit


@register_credit(
    "cure",
    "CURE (arXiv 2508.11016): GRPO's advantage; tokens that trajectories share are trained in the first one alone",
    compares=Compares.GROUP,
    needs=(SEGMENT_IDS,),
)
def compute_cure_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool
) -> torch.Tensor:
    """Return GRPO's advantages (B, T), with 0 at a shared token in all rows but the one that the others continue."""
    nodes = batch_nodes(index, mask)
    # The batch's rows are not in the tree's order, but segments are numbered in it: a row's last one gives its place.
    place = nodes.token_nodes.amax(dim=1).argsort(stable=True).argsort()
    first_place = torch.full_like(nodes.parent, len(place))
    first_place.scatter_reduce_(0, nodes.pass_node, place[nodes.pass_row], "amin")
    is_first = nodes.to_tokens(first_place) == place.unsqueeze(1)
    return trajectory_advantages(rewards, index, epsilon, norm).unsqueeze(-1) * is_first
