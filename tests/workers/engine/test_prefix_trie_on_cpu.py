"""The vectorized trie against a trie of Python dictionaries, on random sequences and by hand."""

import random

import numpy as np
import pytest

from verl.workers.engine.prefix_tree.trie import Trie, build_trie


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def prefixes(sequences: list[list[int]], kinds: list[float]) -> set:
    """Return every distinct (kind, prefix), for each of which a trie has one node."""
    pairs = zip(sequences, kinds, strict=True)
    return {(kind, tuple(sequence[: end + 1])) for sequence, kind in pairs for end in range(len(sequence))}


def random_sequences(rng: random.Random) -> tuple[list[list[int]], list[float]]:
    """Copies and continuations of prefixes of each other: duplicates, the one inside the other, empty, single."""
    sequences: list[list[int]] = []
    for _ in range(rng.randint(1, 12)):
        start = rng.choice(sequences) if sequences and rng.random() < 0.8 else []
        start = start[: rng.randint(0, len(start))]
        sequences.append(start + [rng.randint(0, 2**40 if rng.random() < 0.2 else 2) for _ in range(rng.randint(0, 5))])
    kinds = [rng.choice([1.0, 0.6]) if rng.random() < 0.3 else 1.0 for _ in sequences]
    return sequences, kinds


@pytest.mark.parametrize("seed", range(5))
def test_as_a_trie_of_dictionaries_in_pre_order(seed):
    rng = random.Random(seed)
    for _ in range(100):
        sequences, kinds = random_sequences(rng)
        trie = build_trie(arrays(sequences), kinds)
        check_nodes(trie, sequences, kinds)
        check_order(trie)


def check_nodes(trie: Trie, sequences: list[list[int]], kinds: list[float]) -> None:
    expected = prefixes(sequences, kinds)
    assert len(trie) == len(expected)
    prefix_of: dict[int, tuple] = {}
    for sequence, kind, nodes in zip(sequences, kinds, trie.node_of, strict=True):
        assert len(nodes) == len(sequence)
        for depth, node in enumerate(nodes.tolist()):
            assert trie.tokens[node] == sequence[depth] and trie.depth[node] == depth
            assert trie.parent[node] == (nodes[depth - 1] if depth else -1)
            prefix = kind, tuple(sequence[: depth + 1])
            assert prefix_of.setdefault(node, prefix) == prefix
    assert sorted(prefix_of) == list(range(len(trie)))  # every node is a sequence's, and no two are the same prefix
    assert set(prefix_of.values()) == expected


def check_order(trie: Trie) -> None:
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(trie))}
    for node, parent in enumerate(trie.parent.tolist()):
        children[parent].append(node)
    visited, stack = [], children[-1][::-1]
    while stack:
        visited.append(stack.pop())
        stack.extend(children[visited[-1]][::-1])
    assert visited == list(range(len(trie)))

    for segment, (start, end) in enumerate(zip(trie.segment_starts, trie.segment_ends, strict=True)):
        assert all(children[node] == [node + 1] for node in range(start, end - 1))
        assert len(children[end - 1]) != 1
        path, node = [], int(end) - 1
        while node >= 0:
            path.append(node)
            node = int(trie.parent[node])
        assert trie.segment_path(segment).tolist() == path[::-1]
    assert trie.segment_starts[:1].tolist() == [0][: len(trie)]
    assert trie.segment_ends.tolist() == [*trie.segment_starts[1:], len(trie)][: len(trie.segment_starts)]


@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_nothing(sequences):
    trie = build_trie(arrays(sequences))
    assert len(trie) == len(trie.segment_starts) == len(trie.segment_ends) == 0
    assert [nodes.tolist() for nodes in trie.node_of] == sequences
