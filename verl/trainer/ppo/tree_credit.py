"""Advantages on trees: which of the tokens that trajectories share gets which credit (`algorithm.adv_estimator`).

V(node) is the mean outcome of the trajectories through a node, V(root) their group's mean, s the group's standard
deviation. Whatever grew the trees, these estimators read `segment_ids`, in which equal ids of a group are the same
shared token, and the outcomes:

    arpo_hard   (V(node) - V(root)) / s, in each trajectory through the node (ARPO, arXiv 2507.19849, hard)
    tree_path   the same, divided by the number of those trajectories: a shared token is trained once
    tree_gain   (V(node) - V(root) + V(node) - V(parent)) / s, once: also for being better than what it followed
    treerl      (V(node) - V(root) + V(node) - V(parent)) / sqrt(trajectories through it) (TreeRL, arXiv 2506.11902)

    >>> # segment 0 is shared, 1 and 2 follow it; the first trajectory was right, the second wrong
    >>> segment_ids = torch.tensor([[0, 0, 1, 1], [0, 0, 2, 2]])
    >>> nodes = node_values(torch.tensor([1.0, -1.0]), segment_ids, torch.tensor([0, 0]))
    >>> nodes.value.tolist()
    [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, -1.0, -1.0]]
    >>> nodes.passing.tolist()
    [[2, 2, 1, 1], [2, 2, 1, 1]]
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

from verl.trainer.ppo.token_fields import TokenField

SEGMENT_IDS = TokenField("segment_ids", "this algorithm.adv_estimator")


class NodeValues(NamedTuple):
    """What each token's node knows, all (B, T).

    Args:
        value: V(node).
        parent_value: V of the last node on the path through which more trajectories go; V(root) where there is none.
            A segment that ends without a fork, as before a tool's result, is no node of its own.
        passing: trajectories through the node.
    """

    value: torch.Tensor
    parent_value: torch.Tensor
    passing: torch.Tensor


def node_values(outcomes: torch.Tensor, segment_ids: torch.Tensor, groups: torch.Tensor) -> NodeValues:
    """V of every token's node and of that node's parent.

    Args:
        outcomes: (B,) of each trajectory; one that is there twice counts twice.
        segment_ids: (B, T) integers; within a group equal ids are the same segment. -1: no segment, the token is its
            trajectory's own.
        groups: (B,) the trajectory's prompt, any integers from 0.
    """
    n_rows = len(outcomes)
    if not segment_ids.numel():
        empty = outcomes.new_zeros(segment_ids.shape)
        return NodeValues(empty, empty, torch.ones_like(segment_ids))
    # a run is a stretch of one id in one row: far fewer of them than of tokens
    is_start = torch.ones_like(segment_ids, dtype=torch.bool)
    torch.ne(segment_ids[:, 1:], segment_ids[:, :-1], out=is_start[:, 1:])
    starts = is_start.flatten().nonzero().squeeze(-1)
    lengths = starts.diff(append=starts.new_tensor([segment_ids.numel()]))
    rows, ids = starts // segment_ids.shape[1], segment_ids.flatten()[starts]
    segment_of_run = (groups[rows] * (ids.max() + 2) + ids + 1).unique(return_inverse=True)[1]
    # a row passes a segment once, however many runs it has there
    passes = (segment_of_run * n_rows + rows).unique()
    segments, passing_rows = passes // n_rows, passes % n_rows
    n_passing = segments.bincount()
    mean = outcomes.new_zeros(len(n_passing)).index_add_(0, segments, outcomes[passing_rows]) / n_passing
    value = torch.where(ids >= 0, mean[segment_of_run], outcomes[rows])
    passing = torch.where(ids >= 0, n_passing[segment_of_run], 1)

    group_size = groups.bincount()
    root = outcomes.new_zeros(len(group_size)).index_add_(0, groups, outcomes) / group_size.clamp(min=1)
    parent = _parent_values(value, passing, rows, root[groups[rows]])
    return NodeValues(*(of_run.repeat_interleave(lengths).view_as(segment_ids) for of_run in (value, parent, passing)))


def _parent_values(value, passing, rows, root) -> torch.Tensor:
    """For each run the value of the last one in its row with more trajectories, or its root's; all (runs,).

    The trajectories through a path's nodes only become fewer: runs of equal numbers are one node.
    """
    begins_row = torch.ones_like(rows, dtype=torch.bool)
    torch.ne(rows[1:], rows[:-1], out=begins_row[1:])
    begins_node = begins_row.clone()
    begins_node[1:] |= passing[1:] != passing[:-1]
    first_run = torch.where(begins_node, torch.arange(len(rows), device=rows.device), 0).cummax(0).values
    return torch.where(begins_row[first_run], root, value[(first_run - 1).clamp(min=0)])


def trajectory_advantages(
    token_level_rewards: torch.Tensor, index: np.ndarray, epsilon: float = 1e-6, norm_adv_by_std_in_grpo: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO's advantage of every trajectory (B,), whatever its mask, and the number of its group (B,).

    A trajectory that is alone in its group has nothing to be compared with: 0 (upstream's GRPO: its own score).
    """
    scores = token_level_rewards.sum(dim=-1, keepdim=True)
    soft, _ = compute_grpo_outcome_advantage(scores, torch.ones_like(scores), index, epsilon, norm_adv_by_std_in_grpo)
    groups = torch.from_numpy(np.unique(index, return_inverse=True)[1]).to(scores.device)
    return soft.squeeze(-1) * (groups.bincount()[groups] > 1), groups


def _registered(name: str, credit: Callable[[NodeValues], torch.Tensor], divides_by_std: bool = True):
    """Registers an estimator whose advantage `credit` makes of V(node), V(parent), with V(root) = 0 and s = 1."""

    @register_adv_est(name)
    def estimator(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: np.ndarray,
        epsilon: float = 1e-6,
        config=None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            token_level_rewards: (B, T); their sum is the trajectory's outcome.
            response_mask: (B, T); advantages outside it (a tool's tokens, padding) are 0.
            index: (B,) prompt ids; equal ones are one group.
            epsilon: added to the standard deviation.
            config: upstream's algorithm config, for `norm_adv_by_std_in_grpo`.

        Returns:
            advantages and returns, the same (B, T) tensor.

        Raises:
            RuntimeError: nobody gave the segments (`SEGMENT_IDS.given`).
            ValueError: they have another shape than the mask.
        """
        segment_ids = SEGMENT_IDS.get()
        if segment_ids.shape != response_mask.shape:
            raise ValueError(f"segment_ids {tuple(segment_ids.shape)}: expected {tuple(response_mask.shape)}")
        norm = divides_by_std and (True if config is None else config.get("norm_adv_by_std_in_grpo", True))
        with torch.no_grad():
            soft, groups = trajectory_advantages(token_level_rewards, index, epsilon, norm)
            advantages = credit(node_values(soft, segment_ids, groups)) * response_mask
        return advantages, advantages

    return estimator


def _gain(node: NodeValues) -> torch.Tensor:
    return node.value + node.value - node.parent_value


compute_arpo_hard_advantage = _registered("arpo_hard", lambda node: node.value)
compute_tree_path_advantage = _registered("tree_path", lambda node: node.value / node.passing)
compute_tree_gain_advantage = _registered("tree_gain", lambda node: _gain(node) / node.passing)
compute_treerl_advantage = _registered("treerl", lambda node: _gain(node) / node.passing.sqrt(), divides_by_std=False)
ESTIMATORS = ("arpo_hard", "tree_path", "tree_gain", "treerl")
