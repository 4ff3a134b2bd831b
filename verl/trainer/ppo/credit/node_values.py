"""Advantages on trees from the values of their nodes (choices of `algorithm.adv_estimator`).

V(node) is the mean outcome of the trajectories through a node, V(root) their group's mean, s the group's standard
deviation. A credit registers its formula of these values by `register_value_credit`. All credits on nodes, and the
trainer's metrics, share the nodes of a batch (`batch_nodes`).
"""

from collections.abc import Callable

import numpy as np
import torch

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, NodeValues, batch_nodes, node_values, trajectory_advantages
from verl.utils.parts import Compares, register_credit


def credit_metrics(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, norm_adv_by_std: bool = True
) -> dict[str, float]:
    """Return the share of the model's tokens that several rows share, and the mean |hard - soft| over all of them, for
    any estimator, whose nodes are used; the segments must be bound. A token's soft advantage is GRPO's of its row; its
    hard one is the mean over the trajectories through it."""
    nodes = batch_nodes(index, response_mask)
    soft = trajectory_advantages(token_level_rewards, index, norm_adv_by_std_in_grpo=norm_adv_by_std)
    difference = nodes.to_tokens(node_values(nodes, soft).value).sub_(soft.unsqueeze(-1)).abs_()
    values = {"shared_tokens": nodes.to_tokens((nodes.passing > 1).float()), "hard_minus_soft": difference}
    n_tokens = response_mask.sum().clamp(min=1)
    return {f"credit/{name}": (each.mul_(response_mask).sum() / n_tokens).item() for name, each in values.items()}


def register_value_credit(
    name: str, about: str, credit: Callable[[NodeValues, torch.Tensor], torch.Tensor], divides_by_std: bool = True
):
    """Register an estimator whose `credit` maps nodes' values (V(root) = 0, s = 1) and passing rows to advantages."""

    @register_credit(name, about, compares=Compares.NODES, needs=(SEGMENT_IDS,))
    def estimator(rewards, mask, index, epsilon, norm):
        nodes = batch_nodes(index, mask)
        soft = trajectory_advantages(rewards, index, epsilon, norm and divides_by_std)
        return nodes.to_tokens(credit(node_values(nodes, soft), nodes.passing))

    return estimator


def gain(node: NodeValues) -> torch.Tensor:
    return node.value + node.value - node.parent_value
