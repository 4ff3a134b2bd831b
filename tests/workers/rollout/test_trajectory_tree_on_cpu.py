"""TrajectoryTree: shared prefixes are stored once, and every trajectory comes back whole."""

import random

import pytest

from verl.workers.rollout.trajectory_tree import Segment, TrajectoryTree, tree_of_rows


@pytest.mark.parametrize("seed", range(30))
def test_rows_come_back_and_tokens_are_stored_once(seed):
    generator = random.Random(seed)
    rows = [[generator.randrange(3) for _ in range(generator.randrange(8))] for _ in range(generator.randint(1, 10))]
    log_probs = [[-(0.1 * token + 0.01 * position) for position, token in enumerate(row)] for row in rows]
    returned = [generator.randrange(len(rows)) for _ in range(generator.randint(1, 12))]
    tree = tree_of_rows([7, 8], rows, log_probs, returned)
    assert tree.trajectories() == [rows[row] for row in returned]
    assert tree.log_probs() == [log_probs[row] for row in returned]
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert sum(len(segment.token_ids) for segment in tree.segments) == len(prefixes)


def test_a_hand_made_tree():
    tree = TrajectoryTree([1])
    first = tree.add(Segment(None, [10, 11], [-0.1, -0.2]))
    tool = tree.add(Segment(first, [50, 51, 52], author="tool"))
    left, right = (tree.add(Segment(tool, [token], [-0.5])) for token in (12, 13))
    tree.leaves = [right, left]
    assert tree.trajectories() == [[10, 11, 50, 51, 52, 13], [10, 11, 50, 51, 52, 12]]
    assert tree.response_masks() == [[1, 1, 0, 0, 0, 1]] * 2
    assert tree.log_probs()[0] == [-0.1, -0.2, 0.0, 0.0, 0.0, -0.5]
    assert TrajectoryTree.from_json(tree.to_json()) == tree


def test_wrong_segments_are_refused():
    with pytest.raises(IndexError, match="parent 3 of 0"):
        TrajectoryTree([1]).add(Segment(3, [1]))
    with pytest.raises(ValueError, match="2 log_probs for 1 tokens"):
        Segment(None, [1], [0.0, 0.0])
    with pytest.raises(ValueError, match="author='human'"):
        Segment(None, [1], author="human")
