"""Which nodes of a reasoning tree are expanded next, and with how many children.

A node's score is V + beta_u U: how likely its path leads to a right answer, and how little that is known. One round:

    prune     open nodes whose score is below the threshold; beam: all but the best of the level
    choose    bfs, beam: the open nodes of the upper level; dfs: one of the deepest, drawn by a softmax of the scores
    grant     in an order drawn by the same softmax, children as the node's promise asks for and as there is room for

    >>> search = Search(frontier, config.tree, config.exploration, n_leaves=8, seed=1)
    >>> while expansions := search.next():
    ...     for expansion in expansions:
    ...         ...  # sample its children from the engine, frontier.add each with its V and U

Decided here, as the notes do not say it:
- No open node is left behind: without room for more it gets one child that runs to the final answer.
- The last way to an answer is never pruned, however low its score.
- Ended paths are not pruned by the threshold, as nothing is saved; in a beam they compete for their level's places.
- Dropped steps free their places: the steps that are left may have more children.
- With `independent_paths` the problem has a child for each leaf and a step has one, which is scored like any other.
- Siblings' draws come from (seed, node), so that a tree follows from its seed, however requests are answered in time.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.workers.rollout.trees.hato.config import ExplorationConfig, TreeConfig
from verl.workers.rollout.trees.hato.frontier import LEAF, OPEN, ROOT, Frontier


@dataclass(frozen=True)
class Expansion:
    """What to ask the engine for.

    Args:
        node: after which step.
        children: how many continuations.
        to_the_end: they run to the final answer, instead of to `step_delimiter` or `max_step_tokens`.
    """

    node: int
    children: int
    to_the_end: bool


def temperature_at(progress: float, config: ExplorationConfig) -> float:
    """T0 exp(-decay * progress); progress is training steps done / all, cut to [0, 1]."""
    return config.initial_temperature * math.exp(-config.temperature_decay * min(1.0, max(0.0, progress)))


def softmax(scores: Sequence[float], temperature: float) -> list[float]:
    """exp(score / temperature), over their sum; temperature 0: the best ones share equally."""
    best = max(scores, default=0.0)
    if temperature == 0:
        weights = [float(score == best) for score in scores]
    else:
        weights = [math.exp((score - best) / temperature) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def drawn_order(nodes: Sequence[int], scores: Sequence[float], temperature: float, seed: int) -> list[int]:
    """The nodes as drawn one after another without replacement, each time by the softmax of the scores left.

    Sorting score / temperature + Gumbel noise is such a draw. Noise depends on (seed, node) alone. Temperature 0: by
    score, equals by number.
    """

    def key(pair: tuple[int, float]) -> tuple[float, int]:
        node, of_node = pair
        if temperature == 0:
            return -of_node, node
        uniform = 1.0 - random.Random(f"{seed} {node}").random()  # in (0, 1]
        gumbel = -math.log(max(-math.log(uniform), 1e-300))
        return -(of_node / temperature + gumbel), node

    return [node for node, _ in sorted(zip(nodes, scores, strict=True), key=key)]


def branching_factors(scores: Sequence[float], config: TreeConfig, temperature: float) -> list[int]:
    """How many children each of the nodes chosen together wants.

    With `adaptive_branching`, branching_factor times the node's softmax share times the number of nodes, rounded, from
    1 to 2 branching_factor - 1: equal nodes get branching_factor, and so does a single one.
    """
    if not config.adaptive_branching:
        return [config.branching_factor] * len(scores)
    most = 2 * config.branching_factor - 1
    shares = softmax(scores, temperature)
    return [min(most, max(1, math.floor(config.branching_factor * share * len(scores) + 0.5))) for share in shares]


def ucb_grants(
    means: Sequence[float], visits: Sequence[int], budget: int, coef: float, most: float = math.inf
) -> list[int]:
    """Hands out `budget` expansions one by one to the tree of the highest mean + coef sqrt(ln(all visits) / visits).

    Each grant is a visit. Trees without a visit come first, equals in order. What a full tree cannot take goes to the
    next by the same bound; what no tree can take is not handed out.

    Args:
        means: of each tree, what its expansions have been worth.
        visits: how many it has had.
        most: the largest number of grants for one tree.

    Returns:
        for each tree how many it gets.
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
    """Leaves and open nodes that a tree has at most once it has been expanded to a level.

    >>> [ends_after(level, 8, TreeConfig(max_depth=4)) for level in (1, 2, 3, 4)]
    [2, 3, 5, 8]
    """
    if not config.spread_leaves or config.search_algorithm == "dfs" or config.independent_paths:
        return n_leaves
    return min(n_leaves, math.ceil(round(n_leaves ** (level / config.max_depth), 9)))


class Bounds:
    """How many more children may be made, so that a tree stays within its bounds whatever happens to them.

    Every open node is owed at least one way to an answer, so each counts for one in every bound already:

        leaves     leaves + open nodes                               <= n_leaves
        a level    its nodes + open nodes above it                   <= max_nodes_per_level
        nodes      kept nodes + open nodes (each needs one to end)   <= max_nodes
        spread     leaves + open nodes, after expanding level d      <= n_leaves^((d + 1) / max_depth)   (spread_leaves)

    Once all leaves are given away, nothing will fork any more, and open nodes run to their ends at once; but for
    `independent_paths`, which are there to be given up on the way.
    """

    def __init__(self, frontier: Frontier, config: TreeConfig, n_leaves: int):
        self.config = config
        waiting = frontier.open_steps()
        self.nodes = config.max_nodes - frontier.n_kept - len(waiting)
        self.leaves = n_leaves - frontier.n_leaves - len(waiting)
        self.n_leaves = n_leaves
        levels = range(config.max_depth + 1)
        self.of_level = [config.max_nodes_per_level - frontier.kept_at_depth[level] for level in levels]
        for number in waiting:
            for level in range(frontier.steps[number].depth + 1, config.max_depth + 1):
                self.of_level[level] -= 1

    def grant(self, depth: int, wanted: int, to_the_end: bool) -> tuple[int, bool]:
        """How many children a node gets, at least 1, and whether they have to run to the final answer.

        Args:
            depth: of the node.
            wanted: children.
            to_the_end: they are at the last level.
        """
        if self.leaves <= 0 and not self.config.independent_paths:
            to_the_end = True
        if not to_the_end:
            # n open children count twice among the nodes
            most = (self.nodes + 1) // 2
            if most >= 1:
                return self._take(depth, min(wanted, most), False), False
        return self._take(depth, min(wanted, self.nodes + 1), True), True

    def _take(self, depth: int, wanted: int, to_the_end: bool) -> int:
        # a beam drops what is too much of a level that is not the last, once it is there
        bounded = to_the_end or self.config.search_algorithm != "beam"
        levels = range(depth + 1, depth + 2 if to_the_end else self.config.max_depth + 1)
        more = wanted - 1
        if bounded:
            forks = self.leaves - (self.n_leaves - ends_after(depth + 1, self.n_leaves, self.config))
            more = max(0, min([more, forks, *(self.of_level[level] for level in levels)]))
            self.leaves -= more
            for level in levels:
                self.of_level[level] -= more
        self.nodes -= more if to_the_end else 2 * more + 1
        return more + 1


class Search:
    """Drives the growth of one tree; all it knows is in the frontier and its arguments.

    Args:
        frontier: of the tree that grows.
        config, exploration: see config.py.
        n_leaves: the tree never gets more, so that it fits into as many batch rows.
        seed: of the prompt.
    """

    def __init__(
        self, frontier: Frontier, config: TreeConfig, exploration: ExplorationConfig, *, n_leaves: int, seed: int
    ):
        self.frontier, self.config, self.exploration = frontier, config, exploration
        self.n_leaves, self.seed = n_leaves, seed

    def next(self) -> list[Expansion]:
        """Prunes, then says what to expand; empty when the tree is complete.

        Call it once all children that the last call asked for are in the tree.
        """
        self._prune()
        chosen = self._chosen()
        scores = [self._score(number) for number in chosen]
        temperature = self.exploration.selection_temperature
        wanted = dict(zip(chosen, self._wanted(chosen, scores), strict=True))
        bounds = Bounds(self.frontier, self.config, self.n_leaves)
        granted = {}
        for number in drawn_order(chosen, scores, temperature, self.seed):
            depth = self.frontier.steps[number].depth
            granted[number] = bounds.grant(depth, wanted[number], depth + 1 == self.config.max_depth)
        return [Expansion(number, *granted[number]) for number in chosen]

    def _wanted(self, chosen: Sequence[int], scores: Sequence[float]) -> list[int]:
        """How many children each of the steps chosen together wants."""
        if self.config.independent_paths:
            return [self.n_leaves if number == ROOT else 1 for number in chosen]
        return branching_factors(scores, self.config, self.exploration.selection_temperature)

    def _score(self, number: int) -> float:
        step = self.frontier.steps[number]
        return step.value + self.exploration.beta_u * step.uncertainty

    def _chosen(self) -> list[int]:
        """In number order."""
        waiting, dfs = self.frontier.open_steps(), self.config.search_algorithm == "dfs"
        depths = [self.frontier.steps[number].depth for number in waiting]
        depth = (max if dfs else min)(depths, default=0)
        chosen = [number for number, of_node in zip(waiting, depths, strict=True) if of_node == depth]
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
        """Of the deepest level's nodes, open or ended, the best stay."""
        nodes = self.frontier.steps
        ends = [number for number, node in enumerate(nodes) if node.status in (OPEN, LEAF)]
        depth = max(nodes[number].depth for number in ends)
        level = [number for number in ends if nodes[number].depth == depth]
        # in a beam all open nodes are on one level: the others are leaves
        most = ends_after(depth, self.n_leaves, self.config) - (len(ends) - len(level))
        width = max(1, min(self.config.max_nodes_per_level, most))
        for number in sorted(level, key=self._score, reverse=True)[width:]:
            self.frontier.prune(number)
