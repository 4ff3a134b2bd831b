"""The segments of a batch's trees as nodes, and the functions that credits on trees share.

Whatever grew the trees, `segment_ids` says which tokens the rows of a prompt share: equal ids are the same shared
token. Shapes: B rows, T response positions, N nodes, G prompts.

    >>> # segment 0 is shared, 1 and 2 follow it; the first trajectory was right, the second wrong
    >>> nodes = tree_nodes(torch.tensor([[0, 0, 1, 1], [0, 0, 2, -1]]), np.array(["a", "a"]))
    >>> nodes.token_nodes.tolist(), nodes.parent.tolist(), nodes.passing.tolist()
    ([[0, 0, 1, 1], [0, 0, 2, -1]], [-1, 0, 0], [2, 1, 1])
    >>> node_values(nodes, torch.tensor([1.0, -1.0])).value.tolist()
    [0.0, 1.0, -1.0]

V(node) is the mean outcome of the trajectories through a node, V(root) their group's mean, s the group's standard
deviation. A credit registers its formula of these values by `register_value_credit`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

# This module must not import core_algos: estimators import it while core_algos imports them.
from verl.utils.parts import Compares, register_credit
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a batch's trees, one for each segment, sorted by prompt and within a prompt by segment id. A row
    whose tokens have no segment (-1) has a node of its own for them. Row `pass_row[i]` goes through node
    `pass_node[i]`; each of these P pairs occurs once."""

    token_nodes: torch.Tensor  # (B, T) node of each token; -1 for padding, which has no node
    parent: torch.Tensor  # (N,) node before each node; -1 if the node follows the prompt
    group: torch.Tensor  # (N,) number of each node's prompt in `prompts`
    segment: torch.Tensor  # (N,) segment id of each node; -1 for a row's own tokens
    first_token: torch.Tensor  # (N,) position of each node's first token in a flattened (B, T)
    row_group: torch.Tensor  # (B,) number of each row's prompt
    prompts: np.ndarray  # (G,) prompt ids as in `index`, sorted
    pass_row: torch.Tensor  # (P,)
    pass_node: torch.Tensor  # (P,)

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def passing(self) -> torch.Tensor:
        """The number of rows (N,) through each node."""
        return self.pass_node.bincount(minlength=len(self))

    @cached_property
    def sibling_group(self) -> torch.Tensor:
        """The group number (N,), 0 to N+G-1, equal exactly for nodes that follow the same node or prompt."""
        return torch.where(self.parent < 0, len(self) + self.group, self.parent)

    def sum_below(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum (N,) of the rows' values (B,) over the rows through each node."""
        return values.new_zeros(len(self)).index_add_(0, self.pass_node, values[self.pass_row])

    def sum_of_siblings(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum (N,) of the nodes' values (N,) over each node and its siblings."""
        sums = values.new_zeros(len(self) + len(self.prompts))
        return sums.index_add_(0, self.sibling_group, values)[self.sibling_group]

    def chain_start(self, continues: torch.Tensor) -> torch.Tensor:
        """Return the first node (N,) of each node's chain; nodes that `continues` (N,) marks are in their parent's."""
        start = torch.where(continues & (self.parent >= 0), self.parent, torch.arange(len(self)))
        # Each round doubles the distance over which chains are followed.
        while not torch.equal(above := start[start], start):
            start = above
        return start

    def to_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return the nodes' values (N,) as values (B, T) of tokens; 0 or False where there is no node."""
        return torch.cat([values, values.new_zeros(1)])[self.token_nodes]

    def at_first_token(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value (N,) of each node's first token from the tokens' values (B, T)."""
        return values.flatten()[self.first_token]

    def segment_nodes(self, prompt, segments: Sequence[int]) -> list[int]:
        """Return the node of each of a prompt's segment ids `segments`; -1 for a segment that no row goes through."""
        number = int(np.searchsorted(self.prompts, prompt))
        if number == len(self.prompts) or self.prompts[number] != prompt:
            raise KeyError(f"prompt {prompt!r} is not in this batch")
        begin, end = torch.searchsorted(self.group, torch.tensor([number, number + 1])).tolist()
        node_of = {segment: node for node, segment in enumerate(self.segment[begin:end].tolist(), begin)}
        return [node_of.get(segment, -1) for segment in segments]


def tree_nodes(segment_ids: torch.Tensor, index: np.ndarray, response_mask: torch.Tensor | None = None) -> Nodes:
    """Return the nodes of a batch's segments (B, T): within a prompt (`index` (B,)) equal ids are the same segment, and
    -1 is its row's own token. A run of -1 behind its row's last token with a `response_mask` (B, T) is padding, which
    has no node; without a mask, each run of -1 is, unless its row starts with it."""
    prompts, groups = np.unique(index, return_inverse=True)
    groups = torch.from_numpy(groups)
    n_rows, width = segment_ids.shape
    # A run is a stretch of one id in one row; there are far fewer runs than tokens.
    is_start = torch.ones_like(segment_ids, dtype=torch.bool)
    torch.ne(segment_ids[:, 1:], segment_ids[:, :-1], out=is_start[:, 1:])
    starts = is_start.flatten().nonzero().squeeze(-1)
    rows, columns, ids = starts // max(width, 1), starts % max(width, 1), segment_ids.flatten()[starts]
    is_node = (ids >= 0) | (columns <= _last_masked(response_mask, n_rows, width)[rows])
    own = ids.max() + 1 if len(ids) else 0
    keys = torch.where(ids >= 0, ids, own + rows) + groups[rows] * (own + n_rows)
    keys, node_of_run = keys[is_node].unique(return_inverse=True)
    run_nodes = torch.full_like(ids, -1)
    run_nodes[is_node] = node_of_run
    token_nodes = run_nodes.repeat_interleave(starts.diff(append=starts.new_tensor([segment_ids.numel()])))

    runs = is_node.nonzero().squeeze(-1)
    first = torch.full_like(keys, len(ids)).scatter_reduce_(0, node_of_run, runs, "amin")
    before = (first - 1).clamp(min=0)
    parent = torch.where(columns[first] > 0, run_nodes[before], -1)
    # A row passes a segment once, even if it has several runs there.
    passes = (node_of_run * n_rows + rows[runs]).unique()
    return Nodes(
        token_nodes=token_nodes.view_as(segment_ids),
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
    """Return the last column (B,) whose mask is not 0: -1 if there is none, 0 without a mask."""
    if mask is None or not width:
        return torch.zeros(n_rows, dtype=torch.long)
    counts = (mask != 0).numpy()
    # NumPy's argmax of booleans stops at the first True
    return torch.from_numpy(np.where(counts.any(axis=1), width - 1 - counts[:, ::-1].argmax(axis=1), -1))


def batch_nodes(index: np.ndarray, response_mask: torch.Tensor) -> Nodes:
    """Return `tree_nodes` of the `SEGMENT_IDS` that the trainer has bound; estimators and metrics share the result."""
    segment_ids = SEGMENT_IDS.get()
    if segment_ids.shape != response_mask.shape:
        raise ValueError(f"segment_ids {tuple(segment_ids.shape)}: expected {tuple(response_mask.shape)}")
    return SEGMENT_IDS.once("nodes", (index,), lambda: tree_nodes(segment_ids, index, response_mask))


class NodeValues(NamedTuple):
    """The values (N,) of nodes. The parent is the last node before that more trajectories go through, else the root: a
    segment that ends without a fork, as before a tool's result, is no parent of its own."""

    value: torch.Tensor
    parent_value: torch.Tensor


def node_values(nodes: Nodes, outcomes: torch.Tensor) -> NodeValues:
    """Return V of every node and of its parent from the rows' outcomes (B,); a repeated row counts each time."""
    value = nodes.sum_below(outcomes) / nodes.passing
    totals = outcomes.new_zeros(len(nodes.prompts)).index_add_(0, nodes.row_group, outcomes)
    root = totals / nodes.row_group.bincount(minlength=len(nodes.prompts))
    # The number of trajectories through a node never grows along a path.
    above = nodes.parent[nodes.chain_start(nodes.passing == nodes.passing[nodes.parent])]
    return NodeValues(value, torch.where(above < 0, root[nodes.group], value[above]))


def groups_of_equals(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return (B,) whether all `values` (B,) of a row's group (`groups` (B,), 0 to G-1) are equal, so that
    advantages are 0. Rounding of mean and standard deviation gives -0.1 each for 16 rewards of 0.9 in float32."""
    bounds = values.new_zeros(2, int(groups.max()) + 1 if len(groups) else 0)
    for bound, reduce in zip(bounds, ("amin", "amax"), strict=True):
        bound.scatter_reduce_(0, groups, values, reduce, include_self=False)
    return (bounds[0] == bounds[1])[groups]


def weighted_advantages(
    outcomes: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    epsilon: float,
    norm: bool,
    degrees_of_freedom: int = 1,
) -> torch.Tensor:
    """Return (B,) each outcome minus its group's weighted mean, over the weighted standard deviation if `norm`; exactly
    0 where a group's outcomes are equal. `outcomes` and `weights` are float64.

    The variance is sum(w d^2) / max(sum(w) - degrees of freedom, 1) for weights w and differences d.
    """
    total = groups.bincount(weights)
    centered = outcomes - (groups.bincount(weights * outcomes) / total.clamp(min=1))[groups]
    if norm:
        variance = groups.bincount(weights * centered**2) / (total - degrees_of_freedom).clamp(min=1)
        centered = centered / (variance.sqrt()[groups] + epsilon)
    return centered.masked_fill(groups_of_equals(outcomes, groups), 0.0)


def trajectory_advantages(
    token_level_rewards: torch.Tensor, index: np.ndarray, epsilon: float = 1e-6, norm_adv_by_std_in_grpo: bool = True
) -> torch.Tensor:
    """Return GRPO's advantage of every trajectory (B,), whatever its mask; 0 where a group's outcomes are equal. An
    outcome is the sum of a row's rewards (B, T), a group has one prompt id in `index` (B,), and `epsilon` is added to
    the standard deviation (n - 1)."""
    scores = token_level_rewards.sum(dim=-1).double()
    groups = torch.from_numpy(np.unique(index, return_inverse=True)[1])
    advantages = weighted_advantages(scores, groups, torch.ones_like(scores), epsilon, norm_adv_by_std_in_grpo)
    return advantages.to(token_level_rewards.dtype)


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
