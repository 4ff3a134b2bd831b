"""A reasoning tree: the root is the problem, a node is one reasoning step, a leaf ends with the final answer.

    problem ─┬─ 1 "let x = 3" (drawn twice) ─┬─ 3 "x + 4 = 7. Answer 7"
             │                               └─ 4 "x - 4 = -1. Answer -1"
             └─ 2 "let x = 5"     dropped: holds no tokens any more

    batch row of leaf 3    1 1 1 1 3 3 3 3      trains nodes 1 and 3
    batch row of leaf 4    1 1 1 1 4 4 4 4      trains node 4; node 1 is context there (mask 0)

Nodes are numbered in the order in which they were added, so that a parent comes before its children: one pass upwards
or downwards over the numbers answers every question about all nodes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from verl.workers.rollout.trajectory_tree import Segment, TrajectoryTree

OPEN, EXPANDED, LEAF, PRUNED = "open", "expanded", "leaf", "pruned"
ROOT = 0


@dataclass
class ReasoningNode:
    """One reasoning step.

    Args:
        parent: number of the node before it; None for the root.
        depth: steps from the root, which has 0.
        token_ids, log_probs: the step's tokens and their log-probabilities when they were chosen; none in the root and
            in a pruned node.
        entropy: mean over the tokens, in any unit that the rollout likes; shown only.
        status: `open` (has no children yet), `expanded`, `leaf` (ended), `pruned` (dropped, with all below).
        count: how often it was drawn; more than 1 where siblings were identical.
        children: numbers, pruned ones included.
        value, uncertainty: V and U, by which the search goes.
        local_reward: R_local in [0, 1].
        outcome: the verifier's reward of the whole path that ends here; None where there is none (yet).
        n_tokens: how many tokens it has, or had before it was pruned.
    """

    parent: int | None
    depth: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    entropy: float = 0.0
    status: str = OPEN
    count: int = 1
    children: list[int] = field(default_factory=list)
    value: float = 0.0
    uncertainty: float = 0.0
    local_reward: float = 0.0
    outcome: float | None = None
    n_tokens: int = 0


@dataclass(frozen=True)
class LeafRow:
    """The path to a leaf as a row of the batch; all four lists have one entry per response token.

    Args:
        leaf: number of the node.
        mask: 1 for tokens that this row trains: those of nodes that no row before it runs through.
        node_ids: the node of each token, context included.
    """

    leaf: int
    token_ids: list[int]
    log_probs: list[float]
    mask: list[int]
    node_ids: list[int]


class ReasoningTree:
    """Args:
    prompt_ids: the problem's tokens.
    max_nodes: bound of the kept nodes, the root not counted; None: none.
    """

    def __init__(self, prompt_ids: Sequence[int], max_nodes: int | None = None):
        self.prompt_ids, self.max_nodes = list(prompt_ids), max_nodes
        self.nodes = [ReasoningNode(None, 0)]
        self.n_leaves = 0
        self.kept_at_depth: Counter[int] = Counter()  # the root not counted
        self._open = {ROOT}
        self._same: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) of the kept nodes

    def add(
        self,
        parent: int,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        *,
        ended: bool,
        entropy: float = 0.0,
        value: float = 0.0,
        uncertainty: float = 0.0,
        local_reward: float = 0.0,
    ) -> int:
        """A step after `parent`; where it has this very child, that child is counted once more.

        Args:
            ended: the step ends the path, with an answer or for lack of room.

        Returns:
            the node's number, the old one's where it was merged.

        Raises:
            ValueError: the parent has ended or was dropped, the tree is full, or the lists differ in length.
        """
        self._check(parent, token_ids, log_probs)
        same = self._same.get((parent, tuple(token_ids)))
        if same is not None:
            self.nodes[same].count += 1
            return same
        node = ReasoningNode(
            parent, self.nodes[parent].depth + 1, list(token_ids), list(log_probs), entropy, LEAF if ended else OPEN
        )
        node.value, node.uncertainty, node.local_reward = value, uncertainty, local_reward
        return self._append(node)

    def _check(self, parent: int, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        if len(token_ids) != len(log_probs):
            raise ValueError(f"{len(log_probs)} log_probs for {len(token_ids)} tokens")
        if self.nodes[parent].status not in (OPEN, EXPANDED):
            raise ValueError(f"node {parent} is {self.nodes[parent].status}: it can have no children")

    def _append(self, node: ReasoningNode) -> int:
        if self.max_nodes is not None and self.n_kept >= self.max_nodes:
            raise ValueError(f"the tree holds {self.n_kept} nodes, hato.tree.max_nodes={self.max_nodes}")
        number, above = len(self.nodes), self.nodes[node.parent]
        self.nodes.append(node)
        above.status = EXPANDED
        above.children.append(number)
        self._same[node.parent, tuple(node.token_ids)] = number
        self.kept_at_depth[node.depth] += 1
        self.n_leaves += node.status == LEAF
        self._open.discard(node.parent)
        if node.status == OPEN:
            self._open.add(number)
        node.n_tokens = len(node.token_ids)
        return number

    def prune(self, number: int) -> None:
        """Drops a node with all below, and those above it that have no child left; the root stays. Releases tokens.

        Raises:
            ValueError: it is the root.
        """
        if number == ROOT:
            raise ValueError("the root cannot be pruned")
        while self.nodes[number].parent not in (None, ROOT):
            above = self.nodes[number].parent
            if any(child != number for child in self.kept_children(above)):
                break
            number = above
        waiting = [number]
        while waiting:
            at = waiting.pop()
            node = self.nodes[at]
            if node.status == PRUNED:
                continue
            waiting += node.children
            self._same.pop((node.parent, tuple(node.token_ids)), None)
            self.n_leaves -= node.status == LEAF
            self._open.discard(at)
            node.status, node.token_ids, node.log_probs = PRUNED, [], []
            self.kept_at_depth[node.depth] -= 1

    @property
    def n_kept(self) -> int:
        """The root not counted."""
        return self.kept_at_depth.total()

    def is_kept(self, number: int) -> bool:
        return self.nodes[number].status != PRUNED

    def kept_children(self, number: int) -> list[int]:
        return [child for child in self.nodes[number].children if self.is_kept(child)]

    def open_nodes(self) -> list[int]:
        """Nodes without children that have not ended; the root at first."""
        return sorted(self._open)

    def leaves(self) -> list[int]:
        """The ends of the paths, depth first: neighbours share the longest prefixes."""
        found, waiting = [], [ROOT]
        while waiting:
            at = waiting.pop()
            if self.nodes[at].status == LEAF:
                found.append(at)
            waiting += self.nodes[at].children[::-1]
        return found

    def path(self, number: int) -> list[int]:
        """Numbers of the steps from the first to this one; empty for the root."""
        path, at = [], number
        while at != ROOT:
            path.append(at)
            at = self.nodes[at].parent
        return path[::-1]

    def path_tokens(self, number: int) -> list[int]:
        """Tokens of the steps up to this one, the problem's not included."""
        return [token for step in self.path(number) for token in self.nodes[step].token_ids]

    # -- what leaves the rollout --

    def rows(self, n: int) -> list[LeafRow]:
        """The tree as exactly n rows of a batch, in which every node on a path to a leaf is trained exactly once.

        Where there are fewer leaves than n, they repeat from the first on: repeats have mask 0 throughout.

        Raises:
            ValueError: there is no leaf, or there are more than n (`Search` never makes more).
        """
        leaves = self.leaves()
        if not 1 <= len(leaves) <= n:
            raise ValueError(f"{len(leaves)} leaves for {n} rows: expected 1 to {n}")
        seen: set[int] = set()
        return [self._row(leaf, seen) for leaf in islice(cycle(leaves), n)]

    def _row(self, leaf: int, seen: set[int]) -> LeafRow:
        row = LeafRow(leaf, [], [], [], [])
        for step in self.path(leaf):
            node = self.nodes[step]
            row.token_ids.extend(node.token_ids)
            row.log_probs.extend(node.log_probs)
            row.mask.extend([int(step not in seen)] * len(node.token_ids))
            row.node_ids.extend([step] * len(node.token_ids))
            seen.add(step)
        return row

    def parents(self) -> list[int | None]:
        """Of every node; None for the root."""
        return [node.parent for node in self.nodes]

    def trained_counts(self) -> list[int]:
        """How often each node was drawn; 0 for pruned ones, which are not trained."""
        return [0 if node.status == PRUNED else node.count for node in self.nodes]

    def structure(self) -> dict[str, list]:
        """What rewards and metrics need of the tree, without tokens, in JSON's types; a column per attribute."""
        return {name: [getattr(node, name) for node in self.nodes] for name in STRUCTURE}

    @classmethod
    def from_structure(cls, columns: dict[str, list]) -> "ReasoningTree":
        """A tree that has no tokens; `add` does not know its nodes again."""
        tree, nodes = cls([]), []
        for i, values in enumerate(zip(*(columns[name] for name in STRUCTURE), strict=True)):
            named = dict(zip(STRUCTURE, values, strict=True))
            parent = named.pop("parent")
            nodes.append(ReasoningNode(parent, 0 if parent is None else nodes[parent].depth + 1, **named))
            if parent is not None:
                nodes[parent].children.append(i)
        tree.nodes = nodes
        tree.kept_at_depth = Counter(node.depth for node in nodes[1:] if node.status != PRUNED)
        tree.n_leaves = sum(node.status == LEAF for node in nodes)
        tree._open = {i for i, node in enumerate(nodes) if node.status == OPEN}
        return tree

    def to_trajectory_tree(self, leaves: Sequence[int] | None = None) -> TrajectoryTree:
        """For the viewer and the shared metrics: a segment per node, in order; pruned ones have no tokens.

        Args:
            leaves: of the trajectories in order (those of `rows`); by default every leaf once.
        """
        tree = TrajectoryTree(self.prompt_ids)
        for i, node in enumerate(self.nodes[1:], start=1):
            about = {name: getattr(node, name) for name in SHOWN} | {"node": i}
            about |= {"pruned": "dropped by the search"} if node.status == PRUNED else {}
            parent = None if node.parent == ROOT else node.parent - 1
            tree.add(Segment(parent, list(node.token_ids), list(node.log_probs), info=about))
        tree.leaves = [leaf - 1 for leaf in (self.leaves() if leaves is None else leaves)]
        return tree


STRUCTURE = ("parent", "status", "count", "value", "uncertainty", "local_reward", "entropy", "outcome", "n_tokens")
SHOWN = ("count", "value", "uncertainty", "entropy", "n_tokens")
