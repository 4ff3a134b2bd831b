"""Tree-GRPO's credit (arXiv 2509.21240, equation 5; `algorithm.adv_estimator=tree_grpo`).

A trajectory's outcome against those of its own tree, plus against those of all trees of its prompt, each minus the mean
and over the standard deviation. A tree is what shares its first segment.
"""

import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est

from verl.trainer.ppo.tree_nodes import batch_nodes, trajectory_advantages


@register_adv_est("tree_grpo")
def compute_tree_grpo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tree_credit`'s estimators; the only trajectory of a tree, or of a prompt, has 0 for that part."""
    norm = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    with torch.no_grad():
        # a row's first token is in its tree's first node
        trees = batch_nodes(index, response_mask).of_token[:, :1].flatten().numpy()
        parts = [trajectory_advantages(token_level_rewards, of, epsilon, norm) for of in (trees, index)]
        advantages = sum(parts).unsqueeze(-1) * response_mask
    return advantages, advantages
