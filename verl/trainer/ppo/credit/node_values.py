"""Advantages on trees: which of the tokens that trajectories share gets which credit (`algorithm.adv_estimator`).

V(node) is the mean outcome of the trajectories through a node, V(root) their group's mean, s the group's standard
deviation:

    arpo_hard   (V(node) - V(root)) / s, in each trajectory through the node (ARPO, arXiv 2507.19849, hard)
    tree_path   the same, divided by the number of those trajectories: a shared token is trained once
    tree_gain   (V(node) - V(root) + V(node) - V(parent)) / s, once: also for being better than what it followed
    treerl      (V(node) - V(root) + V(node) - V(parent)) / sqrt(trajectories through it) (TreeRL, arXiv 2506.11902)

`hato` (hato_algos.py) and `tree_grpo` (tree_grpo_credit.py) read the same fields. All of them, and the trainer's
metrics, share the nodes of a batch (`batch_nodes`).
"""

from collections.abc import Callable
from enum import Enum

import numpy as np
import torch
from verl.utils.torch_functional import masked_mean

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, NodeValues, batch_nodes, node_values, trajectory_advantages

__all__ = ["ESTIMATORS", "SEGMENT_IDS", "compares_within_group", "credit_metrics"]

# upstream's (and HAPO's) estimators that compare a row with the other rows of its prompt
GROUP_RELATIVE = frozenset(
    ("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "gpg", "opo", "rloo", "rloo_vectorized", "hapo")
    + ("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline")
)


def compares_within_group(adv_estimator: str | Enum) -> bool:
    """Whether the trainer gives a row that is alone in its group 0: upstream's estimator gives it its score.

    Upstream's `gae`, `reinforce_plus_plus` and `remax` compare with a critic, the batch or a greedy answer; the
    estimators of this file, `hato` and `tree_grpo` give 0 by themselves.
    """
    return getattr(adv_estimator, "value", adv_estimator) in GROUP_RELATIVE


# among them those for which equal outcomes in a group mean advantage 0 in each of its tokens: not those that whiten the
# batch afterwards, compare several rewards, or weigh the rewards of single tokens
ZERO_FOR_EQUALS = GROUP_RELATIVE - {
    *("reinforce_plus_plus_baseline", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")
}


def zero_for_equals(adv_estimator: str | Enum) -> bool:
    """Return whether equal outcomes in a group must give advantage 0, which upstream's rounding misses."""
    return getattr(adv_estimator, "value", adv_estimator) in ZERO_FOR_EQUALS


def credit_metrics(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, norm_adv_by_std: bool = True
) -> dict[str, float]:
    """Over the model's tokens: share of shared ones, and mean |hard - soft| advantage, whichever is trained on.

    To be called where the segments are given; their nodes are those that the estimator has made.
    """
    nodes = batch_nodes(index, response_mask)
    soft = trajectory_advantages(token_level_rewards, index, norm_adv_by_std_in_grpo=norm_adv_by_std)
    hard = nodes.to_tokens(node_values(nodes, soft).value)
    return {
        "credit/shared_tokens": masked_mean(nodes.to_tokens((nodes.passing > 1).float()), response_mask).item(),
        "credit/hard_minus_soft": masked_mean((hard - soft.unsqueeze(-1)).abs(), response_mask).item(),
    }


def register_credit(name: str) -> Callable:
    """Registers a function (rewards, mask, index, epsilon, norm) -> (B, T) advantages as the estimator `name`.

    Args:
        rewards: (B, T) token-level rewards; their sum is the trajectory's outcome.
        mask: (B, T) response mask; advantages outside it (a tool's tokens, padding) are set to 0.
        index: (B,) prompt ids; equal ones are one group.
        epsilon: added to a standard deviation.
        norm: upstream's `norm_adv_by_std_in_grpo`.
    """

    # here, as its import registers the credits that are in other files, which need this function
    from verl.trainer.ppo.core_algos import register_adv_est

    def register(credit: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        @register_adv_est(name)
        def estimator(
            token_level_rewards: torch.Tensor,
            response_mask: torch.Tensor,
            index: np.ndarray,
            epsilon: float = 1e-6,
            config=None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            norm = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
            with torch.no_grad():
                advantages = credit(token_level_rewards, response_mask, index, epsilon, norm) * response_mask
            return advantages, advantages

        estimator.__module__ = credit.__module__
        return estimator

    return register


def _of_values(name: str, credit: Callable[[NodeValues, torch.Tensor], torch.Tensor], divides_by_std: bool = True):
    """Registers an estimator whose advantage `credit` makes of values and passing rows, with V(root) = 0, s = 1."""

    @register_credit(name)
    def estimator(rewards, mask, index, epsilon, norm):
        nodes = batch_nodes(index, mask)
        soft = trajectory_advantages(rewards, index, epsilon, norm and divides_by_std)
        return nodes.to_tokens(credit(node_values(nodes, soft), nodes.passing))

    return estimator


def _gain(node: NodeValues) -> torch.Tensor:
    return node.value + node.value - node.parent_value


compute_arpo_hard_advantage = _of_values("arpo_hard", lambda node, passing: node.value)
compute_tree_path_advantage = _of_values("tree_path", lambda node, passing: node.value / passing)
compute_tree_gain_advantage = _of_values("tree_gain", lambda node, passing: _gain(node) / passing)
compute_treerl_advantage = _of_values("treerl", lambda node, passing: _gain(node) / passing.sqrt(), False)
ESTIMATORS = ("arpo_hard", "tree_path", "tree_gain", "treerl")
