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
- Siblings' draws come from (seed, node), so that a tree follows from its seed, however requests are answered in time.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.workers.rollout.trees.hato.bounds import Bounds, ends_after
from verl.workers.rollout.trees.hato.config import ExplorationConfig, TreeConfig
from verl.workers.rollout.trees.hato.frontier import LEAF, OPEN, ROOT, Frontier, Step


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


def score(step: Step, config: ExplorationConfig) -> float:
    """V + beta_u U."""
    return step.value + config.beta_u * step.uncertainty


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


def ucb_grants(means: Sequence[float], visits: Sequence[int], budget: int, coef: float) -> list[int]:
    """Hands out `budget` expansions one by one to the tree of the highest mean + coef sqrt(ln(all visits) / visits).

    Each grant is a visit. Trees without a visit come first, equals in order.

    Args:
        means: of each tree, what its expansions have been worth.
        visits: how many it has had.

    Returns:
        for each tree how many it gets.
    """
    means, visits = np.array(means, dtype=float), np.array(visits, dtype=float)
    granted = np.zeros(len(means), dtype=int)
    before = visits.sum()
    for grant in range(budget):
        seen = np.maximum(visits, 1)
        bounds = np.where(visits > 0, means + coef * np.sqrt(math.log(max(1, before + grant)) / seen), math.inf)
        best = bounds.argmax()
        visits[best] += 1
        granted[best] += 1
    return granted.tolist()


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
        wanted = dict(zip(chosen, branching_factors(scores, self.config, temperature), strict=True))
        bounds = Bounds(self.frontier, self.config, self.n_leaves)
        granted = {}
        for number in drawn_order(chosen, scores, temperature, self.seed):
            depth = self.frontier.steps[number].depth
            granted[number] = bounds.grant(depth, wanted[number], depth + 1 == self.config.max_depth)
        return [Expansion(number, *granted[number]) for number in chosen]

    def _score(self, number: int) -> float:
        return score(self.frontier.steps[number], self.exploration)

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
