"""HATO's advantage: every reasoning step against its siblings, on its own tokens only (`algorithm.adv_estimator=hato`).

A batch row is the path to a leaf. Each of its tokens names the tree node that it belongs to, and the response mask is 1
in the first row that runs through a node: so every node's tokens are trained exactly once and are context elsewhere.
A row per node would train the same tokens, and compute more: its rows for the leaves are all of these, and further
ones for the inner nodes. Rows of whole paths are also what the verifier scores and upstream counts (n of a prompt).

    problem ─┬─ 1 "ab" ─┬─ 2 "c"  right      R       1: 0.7   2: 0.9   3: 0.1   4: 0.1
             │          └─ 3 "d"  wrong      groups  {1, 4} mean 0.4    {2, 3} mean 0.5
             └─ 4 "ef"            wrong      minus the mean   1: +0.3   4: -0.3   2: +0.4   3: -0.4

    row   tokens   nodes    mask     advantages (norm_adv_by_std_in_grpo=false)
    2     a b c    1 1 2    1 1 1    +0.3  +0.3  +0.4
    3     a b d    1 1 3    0 0 1     0     0    -0.4
    4     e f      4 4      1 1      -0.3  -0.3

Shapes: B rows, T response positions, N nodes of all trees of the batch, one after another.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est

NO_NODE = -1
MIN_STD = 1e-6


class Steps(NamedTuple):
    """The batch's reasoning steps.

    Args:
        node_ids: (B, T) integers, the node of each token, 0 to N-1; -1: none (padding).
        rewards: (N,) R of each node.
        families: (N,) integers, equal for siblings and for them alone; 0 to N-1.
        counts: (N,) how often the node was drawn; 0: it is nobody's sibling and is not trained (roots, pruned nodes).
    """

    node_ids: torch.Tensor
    rewards: torch.Tensor
    families: torch.Tensor
    counts: torch.Tensor


class TreeColumns(NamedTuple):
    """A tree's nodes: TreeColumns(tree.parents(), node_rewards(…).total, tree.trained_counts()).

    Args:
        parents: number of each node's parent in this tree; None for the root.
        rewards: R of each.
        counts: as in `Steps`; a pruned node has 0.
    """

    parents: Sequence[int | None]
    rewards: Sequence[float]
    counts: Sequence[int]


class SiblingAdvantages(NamedTuple):
    """Args:
    advantages: (N,) float32; 0 in families without variance.
    varies: (N,) whether the node's family has variance.
    """

    advantages: torch.Tensor
    varies: torch.Tensor


_STEPS: ContextVar[Steps | None] = ContextVar("hato_steps", default=None)


@contextmanager
def given_steps(steps: Steps):
    """Within it the estimator knows the batch's steps: upstream fixes its signature."""
    token = _STEPS.set(steps)
    try:
        yield
    finally:
        _STEPS.reset(token)


def collate_steps(
    trees: Sequence[TreeColumns], rows: Sequence[tuple[int, Sequence[int]] | None], width: int | None = None
) -> Steps:
    """Numbers the nodes of all trees from 0 to N-1 and pads the rows.

    Args:
        trees: of the batch's prompts.
        rows: for each row its tree and its tokens' nodes in that tree (`LeafRow.node_ids`); None for a padding row.
        width: T; the longest row by default.

    Raises:
        ValueError: a row names a node that its tree lacks, or is longer than `width`.
    """
    first = np.cumsum([0] + [len(tree.parents) for tree in trees])
    families, rewards, counts = [], [], []
    for start, tree in zip(first[:-1], trees, strict=True):
        # a family has its parent's number; the root, without siblings, its own
        parents = [0 if parent is None else parent for parent in tree.parents]
        families.append(np.asarray(parents, dtype=np.int64) + start)
        rewards.append(np.asarray(tree.rewards, dtype=np.float64))
        is_step = np.asarray([parent is not None for parent in tree.parents])
        counts.append(np.asarray(tree.counts, dtype=np.int64) * is_step)
    lengths = [0 if row is None else len(row[1]) for row in rows]
    width = max(lengths, default=0) if width is None else width
    node_ids = np.full((len(rows), width), NO_NODE, dtype=np.int64)
    for i, row in enumerate(rows):
        if row is None:
            continue
        tree, ids = row[0], np.asarray(row[1], dtype=np.int64)
        size = len(trees[tree].parents)
        if len(ids) > width or (len(ids) and not 0 <= ids.min() <= ids.max() < size):
            raise ValueError(f"row {i}: expected up to {width} nodes of 0 to {size - 1}, got {len(ids)}: {row[1]}")
        node_ids[i, : len(ids)] = ids + first[tree]
    columns = (np.concatenate([np.empty(0), *column]) for column in (rewards, families, counts))
    of_rewards, of_families, of_counts = (torch.from_numpy(column) for column in columns)
    return Steps(torch.from_numpy(node_ids), of_rewards, of_families.long(), of_counts.long())


def sibling_advantages(
    rewards: torch.Tensor,
    families: torch.Tensor,
    counts: torch.Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> SiblingAdvantages:
    """count (R - mean) / (std + eps) over siblings, each as often as it was drawn; std as GRPO's (n - 1).

    The factor `count` makes the gradient that of the batch in which identical siblings had not been merged. Siblings
    whose R differ by no more than rounding, and only children, have advantage 0.

    Args:
        rewards, families, counts: (N,), see `Steps`.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False: minus the mean only.
    """
    rewards, weights = rewards.double(), counts.double()

    def of_family(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rewards).index_add_(0, families, values)[families]

    n = of_family(weights)
    centred = rewards - of_family(weights * rewards) / n.clamp(min=1)
    std = (of_family(weights * centred**2) / (n - 1).clamp(min=1)).sqrt()
    varies = std > MIN_STD
    advantages = weights * torch.where(varies, centred, 0.0)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (std + epsilon)
    return SiblingAdvantages(advantages.float(), varies)


def step_advantages(steps: Steps, epsilon: float = 1e-6, norm_adv_by_std_in_grpo: bool = True) -> SiblingAdvantages:
    """`sibling_advantages`, and an only child has its parent's: a chain without a fork is one step, cut into pieces.

    A chain from the root has advantage 0: nothing was beside it.
    """
    own = sibling_advantages(steps.rewards, steps.families, steps.counts, epsilon, norm_adv_by_std_in_grpo)
    drawn = (steps.counts > 0).long()
    siblings = torch.zeros_like(drawn).index_add_(0, steps.families, drawn)[steps.families]
    only = (siblings == 1) & (drawn > 0)
    # a family's number is its parent's; each round doubles how far a chain has been followed
    step_up = torch.where(only, steps.families, torch.arange(len(only)))
    while not torch.equal(above := step_up[step_up], step_up):
        step_up = above
    return SiblingAdvantages(own.advantages[step_up], own.varies[step_up])


def of_tokens(values: torch.Tensor, node_ids: torch.Tensor) -> torch.Tensor:
    """(N,) of nodes as (B, T) of tokens; 0 or False where there is no node."""
    padded = torch.cat([values, values.new_zeros(1)])  # -1 is the last
    return padded[node_ids]


@register_adv_est("hato")
def compute_hato_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | None = None,
    epsilon: float = 1e-6,
    config=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """HATO's sibling-relative advantage.

    Args:
        token_level_rewards: (B, T), not read: the outcomes are in the nodes' rewards (so `use_kl_in_reward` has no
            effect here).
        response_mask: (B, T); 0 for context, as the rollout made it.
        index: not read; families are of the steps.
        epsilon: added to the standard deviation.
        config: upstream's algorithm config, for `norm_adv_by_std_in_grpo`.

    Returns:
        advantages and returns, the same (B, T) tensor.

    Raises:
        RuntimeError: nobody gave the steps (`given_steps`).
        ValueError: their tokens have another shape than the mask.
    """
    if (steps := _STEPS.get()) is None:
        raise RuntimeError("algorithm.adv_estimator=hato needs every token's node: use the HATO trainer (recipe/hato)")
    if steps.node_ids.shape != response_mask.shape:
        raise ValueError(f"node_ids {tuple(steps.node_ids.shape)}: expected {tuple(response_mask.shape)}")
    norm = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    with torch.no_grad():
        nodes = step_advantages(steps, epsilon, norm)
        advantages = of_tokens(nodes.advantages, steps.node_ids).to(response_mask.device) * response_mask
    return advantages, advantages


def informative_mask(steps: Steps, response_mask: torch.Tensor) -> torch.Tensor:
    """The mask (B, T) without the tokens of families without variance: what `filter_groups.enable` trains on.

    So they do not weigh in the mean over tokens. With `steps.rewards` of the verified parts only, families that differ
    in R_local alone are left out as well.
    """
    varies = step_advantages(steps).varies
    return response_mask * of_tokens(varies, steps.node_ids).to(response_mask)


def family_metrics(steps: Steps, response_mask: torch.Tensor) -> dict[str, float]:
    """What the trainer reports of sibling groups: how many, how large, and how many (and how much text) tell nothing.

    Returns:
        `families` of at least two different steps; `family_size` (mean number of draws); `flat_families`, `flat_tokens`
        (shares without variance; of the tokens all that have advantage 0; 1 where there is no family).
    """
    drawn = steps.counts > 0
    sizes = torch.zeros_like(steps.families).index_add_(0, steps.families, drawn.long())
    drawn &= sizes[steps.families] > 1
    families = steps.families[drawn].unique()
    if not len(families):
        return {"families": 0.0, "family_size": 0.0, "flat_families": 1.0, "flat_tokens": 1.0}
    nodes = sibling_advantages(steps.rewards, steps.families, steps.counts)
    varying = steps.families[drawn & nodes.varies].unique()
    kept = informative_mask(steps, response_mask).sum() / response_mask.sum().clamp(min=1)
    return {
        "families": float(len(families)),
        "family_size": steps.counts[drawn].sum().item() / len(families),
        "flat_families": 1 - len(varying) / len(families),
        "flat_tokens": 1 - kept.item(),
    }
