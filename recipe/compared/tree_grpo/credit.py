"""Tree-GRPO's credit (arXiv 2509.21240, equation 5; `algorithm.adv_estimator=tree_grpo`).

A trajectory's advantage is the sum of two: its outcome against those of its own tree, and against those of all trees of
its prompt, each minus the mean and over the standard deviation. Rows with the same first segment are one tree.
"""

import numpy as np
import torch

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, batch_nodes, trajectory_advantages
from verl.utils.parts import Compares, register_credit


@register_credit(
    "tree_grpo",
    "Tree-GRPO (arXiv 2509.21240): each trajectory against its own tree's, and against all of the prompt's",
    compares=Compares.NODES,
    needs=(SEGMENT_IDS,),
)
def compute_tree_grpo_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool
) -> torch.Tensor:
    """Return the advantages (B, 1); the only trajectory of a tree, or of a prompt, has 0 for that part."""
    # a row's first token is in its tree's first node
    trees = batch_nodes(index, mask).token_nodes[:, :1].flatten().numpy()
    parts = [trajectory_advantages(rewards, of, epsilon, norm) for of in (trees, index)]
    return sum(parts).unsqueeze(-1)
