"""Advantages on trees from the values of their nodes (choices of `algorithm.adv_estimator`).

V(node) is the mean outcome of the trajectories through a node, V(root) their group's mean, s the group's standard
deviation:

    arpo_hard   (V(node) - V(root)) / s, in each trajectory through the node (ARPO, arXiv 2507.19849, hard)
    tree_path   the same, divided by the number of those trajectories: a shared token is trained once
    tree_gain   (V(node) - V(root) + V(node) - V(parent)) / s, once: also rewards being better than the parent
    treerl      (V(node) - V(root) + V(node) - V(parent)) / sqrt(trajectories through it) (TreeRL, arXiv 2506.11902)

`hato` (hato.py) and `tree_grpo` (tree_grpo.py) read the same fields. All of them, and the trainer's
metrics, share the nodes of a batch (`batch_nodes`).
"""

from collections.abc import Callable

import numpy as np
import torch
from verl.utils.torch_functional import masked_mean

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, NodeValues, batch_nodes, node_values, trajectory_advantages
from verl.utils.parts import Compares, register_credit


def credit_metrics(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, norm_adv_by_std: bool = True
) -> dict[str, float]:
    """Return the share of the model's tokens that several rows share, and the mean |hard - soft| over all of them.

    A token's soft advantage is GRPO's of its row; its hard one is that of `arpo_hard`. Any estimator may be trained on.
    The segments must be bound (verl/utils/token_fields.py); their nodes are those that the estimator has made.
    """
    nodes = batch_nodes(index, response_mask)
    soft = trajectory_advantages(token_level_rewards, index, norm_adv_by_std_in_grpo=norm_adv_by_std)
    hard = nodes.to_tokens(node_values(nodes, soft).value)
    return {
        "credit/shared_tokens": masked_mean(nodes.to_tokens((nodes.passing > 1).float()), response_mask).item(),
        "credit/hard_minus_soft": masked_mean((hard - soft.unsqueeze(-1)).abs(), response_mask).item(),
    }


def _register_value_credit(
    name: str, about: str, credit: Callable[[NodeValues, torch.Tensor], torch.Tensor], divides_by_std: bool = True
):
    """Register an estimator whose `credit` maps nodes' values (V(root) = 0, s = 1) and passing rows to advantages."""

    @register_credit(name, about, compares=Compares.NODES, needs=(SEGMENT_IDS,))
    def estimator(rewards, mask, index, epsilon, norm):
        nodes = batch_nodes(index, mask)
        soft = trajectory_advantages(rewards, index, epsilon, norm and divides_by_std)
        return nodes.to_tokens(credit(node_values(nodes, soft), nodes.passing))

    return estimator


def _gain(node: NodeValues) -> torch.Tensor:
    return node.value + node.value - node.parent_value


compute_arpo_hard_advantage = _register_value_credit(
    "arpo_hard",
    "ARPO's hard credit (arXiv 2507.19849): a shared token has the mean advantage of the trajectories through it, "
    "(V(node) - V(root)) / s, in each of them",
    lambda node, passing: node.value,
)
compute_tree_path_advantage = _register_value_credit(
    "tree_path", "(V(node) - V(root)) / s, a shared token once", lambda node, passing: node.value / passing
)
compute_tree_gain_advantage = _register_value_credit(
    "tree_gain",
    "(V(node) - V(root) + V(node) - V(parent)) / s, a shared token once: what a node is worth, and by how much it is "
    "better than what it followed",
    lambda node, passing: _gain(node) / passing,
)
compute_treerl_advantage = _register_value_credit(
    "treerl",
    "TreeRL (arXiv 2506.11902): (V(node) - V(root) + V(node) - V(parent)) / sqrt(trajectories through the node)",
    lambda node, passing: _gain(node) / passing.sqrt(),
    divides_by_std=False,
)
