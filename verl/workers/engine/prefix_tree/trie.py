"""The trie of a micro-batch's sequences, in NumPy.

The sequences are sorted, so that the longest prefix a sequence shares with any earlier one is the prefix it shares with
its predecessor. It adds its other tokens as new nodes. The nodes are therefore in pre-order: an only child directly
follows its parent. Python loops over sequences here, never over tokens.

For the sequences [7, 8, 9], [7, 8] and [7, 8, 5, 5]:

    node       0  1  2  3  4
    token      7  8  5  5  9        node_of[0] = [0, 1, 4]
    parent    -1  0  1  2  1        node_of[1] = [0, 1]
    depth      0  1  2  3  2        node_of[2] = [0, 1, 2, 3]
    segments  [0, 2), [2, 4), [4, 5)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trie:
    """A trie of N nodes in pre-order, each the last token of a distinct prefix. It is a forest if first tokens differ.
    A segment is a maximal chain: each of its nodes but the last has one child, which is the next node. All arrays are
    of int64."""

    tokens: np.ndarray  # (N,) token id of each node
    parent: np.ndarray  # (N,) parent of each node; -1 at a root
    depth: np.ndarray  # (N,) position of the node's token in its sequences
    node_of: list[np.ndarray]  # nodes of each sequence's tokens
    segment_starts: np.ndarray  # (S,) first node of each segment
    segment_ends: np.ndarray  # (S,) node after each segment's last
    segment_sequence: np.ndarray  # (S,) index of a sequence that passes through the segment

    def __len__(self) -> int:
        return len(self.tokens)

    def segment_path(self, segment: int) -> np.ndarray:
        """Return the nodes from the root to the segment's last node; entry i is at depth i."""
        last = self.segment_ends[segment] - 1
        return self.node_of[self.segment_sequence[segment]][: self.depth[last] + 1]


def build_trie(sequences: Sequence[np.ndarray], kinds: Sequence[float] | None = None) -> Trie:
    """Return the trie of 1-D sequences of token ids, which may be empty; those of different `kinds` share no node."""
    rows = [np.ascontiguousarray(sequence, dtype=np.int64) for sequence in sequences]
    order, shared = sort_by_prefix(rows, kinds)
    node_of: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(rows)
    chains, size, path = [], 0, np.empty(0, dtype=np.int64)
    for index, prefix in zip(order, shared, strict=True):
        row = rows[index]
        added = np.arange(size, size + len(row) - prefix)
        path = np.concatenate([path[:prefix], added])
        node_of[index] = path
        if len(added):
            chains.append((index, prefix, path[prefix - 1] if prefix else -1, len(added)))
            size += len(added)
    return _with_segments(rows, node_of, np.array(chains, dtype=np.int64).reshape(-1, 4))


def sort_by_prefix(rows: list[np.ndarray], kinds: Sequence[float] | None = None) -> tuple[list[int], list[int]]:
    """Return the int64 rows' order in a trie, and the length of the prefix that each shares with its predecessor."""
    kinds = [0.0] * len(rows) if kinds is None else kinds
    # any order that keeps equal prefixes together is right; the order of the bytes is fast
    keys = [(kind, row.tobytes()) for kind, row in zip(kinds, rows, strict=True)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [0] * len(rows)
    for i in range(1, len(rows)):
        if kinds[order[i - 1]] == kinds[order[i]]:
            shared[i] = _shared_prefix(rows[order[i - 1]], rows[order[i]])
    return order, shared


def distinct_tokens(sequences: Sequence[np.ndarray]) -> int:
    """Return the number of nodes of the sequences' trie."""
    _, shared = sort_by_prefix([np.ascontiguousarray(sequence, dtype=np.int64) for sequence in sequences])
    return sum(map(len, sequences)) - sum(shared)


def _shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _with_segments(rows: list[np.ndarray], node_of: list[np.ndarray], chains: np.ndarray) -> Trie:
    """Return the trie; `chains` (C, 4) lists added nodes: sequence, depth and parent of the first node, and count."""
    sequence, first_depth, first_parent, count = chains.T
    ends = np.cumsum(count)
    starts = ends - count
    nodes = np.arange(count.sum())
    depth = nodes + np.repeat(first_depth - starts, count)
    parent = nodes - 1
    parent[starts] = first_parent
    tokens = [rows[index][begin : begin + added] for index, begin, _, added in chains.tolist()]
    children = np.bincount(parent[parent >= 0], minlength=len(nodes))
    begins = parent != nodes - 1
    begins[:1] = True
    begins[1:] |= children[:-1] > 1
    segment_starts = np.flatnonzero(begins)
    segment_ends = np.append(segment_starts[1:], len(nodes)) if len(nodes) else segment_starts
    return Trie(
        tokens=np.concatenate(tokens) if tokens else np.empty(0, dtype=np.int64),
        parent=parent,
        depth=depth,
        node_of=node_of,
        segment_starts=segment_starts,
        segment_ends=segment_ends,
        segment_sequence=np.repeat(sequence, count)[segment_ends - 1],
    )
