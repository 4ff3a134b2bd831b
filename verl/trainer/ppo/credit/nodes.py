"""The segments of a batch's trees as nodes, and what every credit on trees computes of them.

Whatever grew the trees, `segment_ids` says which tokens the rows of a prompt share: equal ids are the same shared
token. Shapes: B rows, T response positions, N nodes, G prompts.

    >>> # segment 0 is shared, 1 and 2 follow it; the first trajectory was right, the second wrong
    >>> nodes = tree_nodes(torch.tensor([[0, 0, 1, 1], [0, 0, 2, -1]]), np.array(["a", "a"]))
    >>> nodes.of_token.tolist(), nodes.parent.tolist(), nodes.passing.tolist()
    ([[0, 0, 1, 1], [0, 0, 2, -1]], [-1, 0, 0], [2, 1, 1])
    >>> node_values(nodes, torch.tensor([1.0, -1.0])).value.tolist()
    [0.0, 1.0, -1.0]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

# this module imports no core_algos: estimators import it while core_algos imports them
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS


@dataclass(frozen=True, eq=False)
class Nodes:
    """The segments of a batch's trees; those of a prompt lie together, in the order of their ids.

    A row whose tokens have no segment (-1) has a node of its own for them.

    Args:
        of_token: (B, T) each token's node; -1: none (padding).
        parent: (N,) the node before it; -1: it follows the prompt.
        group: (N,) number of its prompt in `prompts`.
        segment: (N,) its id; -1: a row's own tokens.
        first_token: (N,) where its first token is in a flattened (B, T).
        row_group: (B,) number of each row's prompt.
        prompts: (G,) what `index` calls them, sorted.
        pass_row, pass_node: (P,) row `pass_row[i]` goes through `pass_node[i]`, once for each pair.
    """

    of_token: torch.Tensor
    parent: torch.Tensor
    group: torch.Tensor
    segment: torch.Tensor
    first_token: torch.Tensor
    row_group: torch.Tensor
    prompts: np.ndarray
    pass_row: torch.Tensor
    pass_node: torch.Tensor

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def passing(self) -> torch.Tensor:
        """(N,) rows through each node."""
        return self.pass_node.bincount(minlength=len(self))

    @cached_property
    def sibling_group(self) -> torch.Tensor:
        """(N,) a number from 0 to N+G-1, equal for nodes that follow the same node or prompt, and for them alone."""
        return torch.where(self.parent < 0, len(self) + self.group, self.parent)

    def sum_below(self, of_rows: torch.Tensor) -> torch.Tensor:
        """(B,) of rows as (N,): the sum over the rows through each node."""
        return of_rows.new_zeros(len(self)).index_add_(0, self.pass_node, of_rows[self.pass_row])

    def sum_of_siblings(self, of_nodes: torch.Tensor) -> torch.Tensor:
        """(N,) summed over each node and its siblings."""
        sums = of_nodes.new_zeros(len(self) + len(self.prompts))
        return sums.index_add_(0, self.sibling_group, of_nodes)[self.sibling_group]

    def chain_start(self, continues: torch.Tensor) -> torch.Tensor:
        """(N,) for each node the first one of its chain.

        Args:
            continues: (N,) whether a node that has a parent belongs to the parent's chain.
        """
        start = torch.where(continues & (self.parent >= 0), self.parent, torch.arange(len(self)))
        # each round doubles how far a chain has been followed
        while not torch.equal(above := start[start], start):
            start = above
        return start

    def to_tokens(self, of_nodes: torch.Tensor) -> torch.Tensor:
        """(N,) of nodes as (B, T) of tokens; 0 or False where there is no node."""
        return torch.cat([of_nodes, of_nodes.new_zeros(1)])[self.of_token]

    def at_first_token(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) of tokens as (N,): what the first token of each node has."""
        return of_tokens.flatten()[self.first_token]

    def of_segments(self, prompt, segments: Sequence[int]) -> list[int]:
        """The nodes of a prompt's segments, by their ids; -1 where no row goes through it.

        Raises:
            KeyError: the batch has no such prompt.
        """
        number = int(np.searchsorted(self.prompts, prompt))
        if number == len(self.prompts) or self.prompts[number] != prompt:
            raise KeyError(f"prompt {prompt!r} is not in this batch")
        begin, end = torch.searchsorted(self.group, torch.tensor([number, number + 1])).tolist()
        node_of = {segment: node for node, segment in enumerate(self.segment[begin:end].tolist(), begin)}
        return [node_of.get(segment, -1) for segment in segments]


def tree_nodes(segment_ids: torch.Tensor, index: np.ndarray, response_mask: torch.Tensor | None = None) -> Nodes:
    """The nodes that a batch's segments make.

    Args:
        segment_ids: (B, T) integers; within a prompt equal ids are the same segment. -1: the token is its row's own.
        index: (B,) prompt ids.
        response_mask: (B, T); -1 where no masked token follows is padding, and a row of padding has no node. None: -1
            is padding wherever a segment is before it.
    """
    prompts, groups = np.unique(index, return_inverse=True)
    groups = torch.from_numpy(groups)
    n_rows, width = segment_ids.shape
    # a run is a stretch of one id in one row: far fewer of them than of tokens
    is_start = torch.ones_like(segment_ids, dtype=torch.bool)
    torch.ne(segment_ids[:, 1:], segment_ids[:, :-1], out=is_start[:, 1:])
    starts = is_start.flatten().nonzero().squeeze(-1)
    rows, columns, ids = starts // max(width, 1), starts % max(width, 1), segment_ids.flatten()[starts]
    is_node = (ids >= 0) | (columns <= _last_masked(response_mask, n_rows, width)[rows])
    own = ids.max() + 1 if len(ids) else 0
    keys = torch.where(ids >= 0, ids, own + rows) + groups[rows] * (own + n_rows)
    keys, node_of_run = keys[is_node].unique(return_inverse=True)
    of_run = torch.full_like(ids, -1)
    of_run[is_node] = node_of_run
    of_token = of_run.repeat_interleave(starts.diff(append=starts.new_tensor([segment_ids.numel()])))

    runs = is_node.nonzero().squeeze(-1)
    first = torch.full_like(keys, len(ids)).scatter_reduce_(0, node_of_run, runs, "amin")
    before = (first - 1).clamp(min=0)
    parent = torch.where(columns[first] > 0, of_run[before], -1)
    # a row passes a segment once, however many runs it has there
    passes = (node_of_run * n_rows + rows[runs]).unique()
    return Nodes(
        of_token=of_token.view_as(segment_ids),
        parent=parent,
        group=groups[rows[first]],
        segment=ids[first],
        first_token=starts[first],
        row_group=groups,
        prompts=prompts,
        pass_row=passes % max(n_rows, 1),
        pass_node=passes // max(n_rows, 1),
    )


def _last_masked(mask: torch.Tensor | None, n_rows: int, width: int) -> torch.Tensor:
    """(B,) the last column whose mask is not 0; -1 where there is none; the first one without a mask."""
    if mask is None or not width:
        return torch.zeros(n_rows, dtype=torch.long)
    return torch.where(mask != 0, torch.arange(width), -1).amax(dim=1)


def batch_nodes(index: np.ndarray, response_mask: torch.Tensor) -> Nodes:
    """`tree_nodes` of the `SEGMENT_IDS` that the trainer has given; made once, for estimators and metrics alike.

    Raises:
        RuntimeError: nobody gave the segments (`SEGMENT_IDS.bound`).
        ValueError: they have another shape than the mask.
    """
    segment_ids = SEGMENT_IDS.get()
    if segment_ids.shape != response_mask.shape:
        raise ValueError(f"segment_ids {tuple(segment_ids.shape)}: expected {tuple(response_mask.shape)}")
    return SEGMENT_IDS.once("nodes", (index,), lambda: tree_nodes(segment_ids, index, response_mask))


class NodeValues(NamedTuple):
    """Args:
    value: (N,) V(node).
    parent_value: (N,) V of the last node on the path through which more trajectories go; V(root) where there is none.
        A segment that ends without a fork, as before a tool's result, is no node of its own.
    """

    value: torch.Tensor
    parent_value: torch.Tensor


def node_values(nodes: Nodes, outcomes: torch.Tensor) -> NodeValues:
    """V of every node and of its parent; outcomes: (B,) of the rows, one that is there twice counts twice."""
    value = nodes.sum_below(outcomes) / nodes.passing
    totals = outcomes.new_zeros(len(nodes.prompts)).index_add_(0, nodes.row_group, outcomes)
    root = totals / nodes.row_group.bincount(minlength=len(nodes.prompts))
    # the trajectories through a path's nodes only become fewer
    above = nodes.parent[nodes.chain_start(nodes.passing == nodes.passing[nodes.parent])]
    return NodeValues(value, torch.where(above < 0, root[nodes.group], value[above]))


def groups_of_equals(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return (B,) whether all values of a row's group are equal, in which case each advantage is 0.

    A mean and a standard deviation of equal values differ from them by rounding, which the division by the standard
    deviation turns into advantages: -0.1 each for 16 rewards of 0.9 in float32.

    Args:
        values: (B,) what is compared within a group.
        groups: (B,) its group, 0 to G-1.
    """
    bounds = values.new_zeros(2, int(groups.max()) + 1 if len(groups) else 0)
    for bound, reduce in zip(bounds, ("amin", "amax"), strict=True):
        bound.scatter_reduce_(0, groups, values, reduce, include_self=False)
    return (bounds[0] == bounds[1])[groups]


def trajectory_advantages(
    token_level_rewards: torch.Tensor, index: np.ndarray, epsilon: float = 1e-6, norm_adv_by_std_in_grpo: bool = True
) -> torch.Tensor:
    """Return GRPO's advantage of every trajectory (B,), whatever its mask; 0 where a group's outcomes are equal.

    Args:
        token_level_rewards: (B, T); their sum is the trajectory's outcome.
        index: (B,) equal ones are one group.
        epsilon: added to the standard deviation (n - 1).
        norm_adv_by_std_in_grpo: False: minus the mean only.
    """
    scores = token_level_rewards.sum(dim=-1).double()
    groups = torch.from_numpy(np.unique(index, return_inverse=True)[1])
    size = groups.bincount()

    def of_group(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(size, dtype=torch.float64).index_add_(0, groups, values)

    centered = scores - (of_group(scores) / size)[groups]
    if norm_adv_by_std_in_grpo:
        centered = centered / ((of_group(centered**2) / (size - 1).clamp(min=1)).sqrt()[groups] + epsilon)
    return centered.masked_fill(groups_of_equals(scores, groups), 0.0).to(token_level_rewards.dtype)
