"""How many more children may be made, so that a tree stays within its bounds whatever happens to them.

Every open node is owed at least one way to an answer, so each counts for one in every bound already:

    leaves     leaves + open nodes                               <= n_leaves
    a level    its nodes + open nodes above it                   <= max_nodes_per_level
    nodes      kept nodes + open nodes (each needs one to end)   <= max_nodes
    spread     leaves + open nodes, after expanding level d      <= n_leaves^((d + 1) / max_depth)     (spread_leaves)

Once all leaves are given away, nothing will fork any more, and open nodes run to their ends at once.
"""

import math

from verl.workers.rollout.trees.hato.config import TreeConfig
from verl.workers.rollout.trees.hato.frontier import Frontier


def ends_after(level: int, n_leaves: int, config: TreeConfig) -> int:
    """Leaves and open nodes that a tree has at most once it has been expanded to a level.

    >>> [ends_after(level, 8, TreeConfig(max_depth=4)) for level in (1, 2, 3, 4)]
    [2, 3, 5, 8]
    """
    if not config.spread_leaves or config.search_algorithm == "dfs":
        return n_leaves
    return min(n_leaves, math.ceil(round(n_leaves ** (level / config.max_depth), 9)))


class Bounds:
    """Counts of a tree, and of what has been granted since.

    Args:
        frontier: as it stands.
        config: its bounds.
        n_leaves: so many leaves at most.
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
        if self.leaves <= 0:
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
