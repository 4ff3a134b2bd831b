"""The search that decides which nodes of a reasoning tree are expanded next, and with how many children.

A node's score is V + beta_u U: how likely its path leads to a right answer, and how uncertain that is. One round:

    prune     open nodes whose score is below the threshold; beam: all but the best of the level
    choose    bfs, beam: the open nodes of the upper level; dfs: one of the deepest, drawn by a softmax of the scores
    grant     in an order drawn by the same softmax, each node gets children by its score, within the tree's bounds

    >>> search = Search(frontier, config.tree, config.exploration, n_leaves=8, seed=1)
    >>> while expansions := search.next():
    ...     for expansion in expansions:
    ...         ...  # sample its children from the engine, frontier.add each with its V and U

Decisions made here, because the design notes are silent:
- Every open node is expanded: if the bounds allow no more, it gets one child that runs to the final answer.
- The last open path is never pruned while no path has ended, however low its score.
- Ended paths are not pruned by the threshold, as that saves nothing; in a beam they compete for their level's places.
- Dropped steps free their places: the remaining steps may have more children.
- Random draws depend on the seed and the node's number only, so the order of the engine's answers has no effect.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recipe.hato.frontier import LEAF, OPEN, ROOT, Frontier
from recipe.hato.keys import ExplorationConfig, TreeConfig


class NodeBudget(NamedTuple):
    """The largest number of nodes of one prompt's tree."""

    max_nodes: int


@dataclass(frozen=True)
class Expansion:
    """A request for a node's children, which run to `step_delimiter`, `max_step_tokens` or (`to_the_end`) the final
    answer."""

    node: int
    children: int
    to_the_end: bool


def temperature_at(progress: float, config: ExplorationConfig) -> float:
    """Return T0 exp(-decay * progress); progress is the share of training steps done, cut to [0, 1]."""
    return config.initial_temperature * math.exp(-config.temperature_decay * min(1.0, max(0.0, progress)))


def softmax(scores: Sequence[float], temperature: float) -> list[float]:
    """Return exp(score / temperature) over their sum; at temperature 0 the best ones share equally."""
    best = max(scores, default=0.0)
    if temperature == 0:
        weights = [float(score == best) for score in scores]
    else:
        weights = [math.exp((score - best) / temperature) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def drawn_order(nodes: Sequence[int], scores: Sequence[float], temperature: float, seed: int) -> list[int]:
    """Return the nodes in an order drawn without replacement, each time by the softmax of the remaining scores.

    Sorting by score / temperature + Gumbel noise is such a draw. The noise depends on (seed, node) alone. At
    temperature 0 the order is by score, and by number among equal scores.
    """

    def key(pair: tuple[int, float]) -> tuple[float, int]:
        node, score = pair
        if temperature == 0:
            return -score, node
        uniform = 1.0 - random.Random(f"{seed} {node}").random()  # in (0, 1]
        gumbel = -math.log(max(-math.log(uniform), 1e-300))
        return -(score / temperature + gumbel), node

    return [node for node, _ in sorted(zip(nodes, scores, strict=True), key=key)]


def branching_factors(scores: Sequence[float], config: TreeConfig, temperature: float) -> list[int]:
    """Return the number of children of each of the nodes chosen together, before the tree's bounds are applied.

    With `adaptive_branching` it is branching_factor times the node's softmax share times the number of nodes, rounded,
    from 1 to 2 branching_factor - 1: equal nodes get branching_factor, and so does a single one.
    """
    if not config.adaptive_branching:
        return [config.branching_factor] * len(scores)
    most = 2 * config.branching_factor - 1
    shares = softmax(scores, temperature)
    return [min(most, max(1, math.floor(config.branching_factor * share * len(scores) + 0.5))) for share in shares]


def ucb_grants(
    means: Sequence[float], visits: Sequence[int], budget: int, coef: float, most: float = math.inf
) -> list[int]:
    """Grant `budget` expansions one by one to the tree of the highest mean + coef sqrt(ln(all visits) / visits).

    Each grant counts as a visit. Trees without a visit come first, equal ones in order. Once a tree has `most` grants,
    the others get the rest; what no tree can take is not granted. `means` and `visits` are the mean value and the
    number of each tree's expansions.
    """
    worth, counts = np.array(means, dtype=float), np.array(visits, dtype=float)
    granted = np.zeros(len(worth), dtype=int)
    before = counts.sum()
    for grant in range(int(min(budget, most * len(worth)))):
        seen = np.maximum(counts, 1)
        bounds = np.where(counts > 0, worth + coef * np.sqrt(math.log(max(1, before + grant)) / seen), math.inf)
        best = np.where(granted < most, bounds, -math.inf).argmax()
        counts[best] += 1
        granted[best] += 1
    return granted.tolist()


def ends_after(level: int, n_leaves: int, config: TreeConfig) -> int:
    """Return the largest number of leaves and open nodes that a tree may have once it has nodes at `level`.

    It is n_leaves^(level / max_depth), rounded up; without spread_leaves, or with dfs, it is n_leaves.

    >>> [ends_after(level, 8, TreeConfig(max_depth=4)) for level in (1, 2, 3, 4)]
    [2, 3, 5, 8]
    """
    if not config.spread_leaves or config.search_algorithm == "dfs":
        return n_leaves
    return min(n_leaves, math.ceil(round(n_leaves ** (level / config.max_depth), 9)))


class Bounds:
    """The number of children that may still be added, so that a tree stays within its bounds whatever follows.

    At least one path to an answer is reserved for every open node, so each already counts once in every bound:

        leaves     leaves + open nodes                               <= n_leaves
        a level    its nodes + open nodes above it                   <= max_nodes_per_level
        nodes      kept nodes + open nodes (each needs one to end)   <= max_nodes
        spread     leaves + open nodes, after expanding level d      <= n_leaves^((d + 1) / max_depth)   (spread_leaves)

    Once all leaves are assigned, nothing will fork any more, and open nodes run to their ends at once.
    """

    def __init__(self, frontier: Frontier, config: TreeConfig, n_leaves: int):
        self.config = config
        waiting = frontier.open_steps()
        self.nodes = config.max_nodes - frontier.n_kept - len(waiting)
        self.leaves = n_leaves - frontier.n_leaves - len(waiting)
        self.n_leaves = n_leaves
        levels = range(config.max_depth + 1)
        self.level_capacity = [config.max_nodes_per_level - frontier.kept_at_depth[level] for level in levels]
        for number in waiting:
            for level in range(frontier.steps[number].depth + 1, config.max_depth + 1):
                self.level_capacity[level] -= 1

    def grant(self, depth: int, children: int, to_the_end: bool) -> tuple[int, bool]:
        """Return the number of children a node gets, at least 1, and whether they must run to the final answer (as they
        do at the last level). They use up places, so that the next call has fewer to give."""
        if self.leaves <= 0:
            to_the_end = True
        if not to_the_end:
            # Each open child counts twice among the nodes: itself, and one more to end its path.
            most = (self.nodes + 1) // 2
            if most >= 1:
                return self._take(depth, min(children, most), False), False
        return self._take(depth, min(children, self.nodes + 1), True), True

    def _take(self, depth: int, children: int, to_the_end: bool) -> int:
        # A beam may exceed the bound of a level before the last one: it drops the surplus afterwards.
        bounded = to_the_end or self.config.search_algorithm != "beam"
        levels = range(depth + 1, depth + 2 if to_the_end else self.config.max_depth + 1)
        more = children - 1
        if bounded:
            forks = self.leaves - (self.n_leaves - ends_after(depth + 1, self.n_leaves, self.config))
            more = max(0, min([more, forks, *(self.level_capacity[level] for level in levels)]))
            self.leaves -= more
            for level in levels:
                self.level_capacity[level] -= more
        self.nodes -= more if to_the_end else 2 * more + 1
        return more + 1


class Search:
    """The search of one tree, with at most `n_leaves` leaves; its whole state is in the frontier."""

    def __init__(
        self, frontier: Frontier, config: TreeConfig, exploration: ExplorationConfig, *, n_leaves: int, seed: int
    ):
        self.frontier, self.config, self.exploration = frontier, config, exploration
        self.n_leaves, self.seed = n_leaves, seed

    def next(self) -> list[Expansion]:
        """Prune, then return the nodes to expand; none when the tree is complete. Call it after all children that the
        last call requested have been added to the tree."""
        self._prune()
        chosen = self._chosen()
        scores = [self._score(number) for number in chosen]
        temperature = self.exploration.selection_temperature
        counts = branching_factors(scores, self.config, temperature)
        child_counts = dict(zip(chosen, counts, strict=True))
        bounds = Bounds(self.frontier, self.config, self.n_leaves)
        granted = {}
        for number in drawn_order(chosen, scores, temperature, self.seed):
            depth = self.frontier.steps[number].depth
            granted[number] = bounds.grant(depth, child_counts[number], depth + 1 == self.config.max_depth)
        return [Expansion(number, *granted[number]) for number in chosen]

    def _score(self, number: int) -> float:
        step = self.frontier.steps[number]
        return step.value + self.exploration.beta_u * step.uncertainty

    def _chosen(self) -> list[int]:
        waiting, dfs = self.frontier.open_steps(), self.config.search_algorithm == "dfs"
        depths = [self.frontier.steps[number].depth for number in waiting]
        depth = (max if dfs else min)(depths, default=0)
        chosen = [number for number, step_depth in zip(waiting, depths, strict=True) if step_depth == depth]
        if not dfs:
            return chosen
        scores = [self._score(number) for number in chosen]
        return drawn_order(chosen, scores, self.exploration.selection_temperature, self.seed)[:1]

    def _prune(self) -> None:
        waiting = [number for number in self.frontier.open_steps() if number != ROOT]
        poor = [number for number in waiting if self._score(number) < self.exploration.pruning_threshold]
        if poor and len(poor) == len(waiting) and not self.frontier.n_leaves:
            poor.remove(max(poor, key=self._score))
        for number in poor:
            self.frontier.prune(number)
        if self.config.search_algorithm == "beam":
            self._prune_to_beam()

    def _prune_to_beam(self) -> None:
        """Drop all but the best nodes, open or ended, of the deepest level."""
        nodes = self.frontier.steps
        ends = [number for number, node in enumerate(nodes) if node.status in (OPEN, LEAF)]
        depth = max(nodes[number].depth for number in ends)
        level = [number for number in ends if nodes[number].depth == depth]
        # In a beam all open nodes are on one level, so the nodes above it are leaves.
        most = ends_after(depth, self.n_leaves, self.config) - (len(ends) - len(level))
        width = max(1, min(self.config.max_nodes_per_level, most))
        for number in sorted(level, key=self._score, reverse=True)[width:]:
            self.frontier.prune(number)
