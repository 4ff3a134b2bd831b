"""Diversity of a group, by hand."""

import pytest

from verl.trainer.ppo.group_diversity import group_diversity


def test_by_hand():
    # distances 1/4, 4/4, 4/4; common subsequences 3/4, 0, 0
    found = group_diversity([[1, 2, 3, 4], [1, 2, 3, 5], [6, 7, 8, 9]], ["7", "7", None])
    assert found == pytest.approx(
        {"edit_distance": 0.75, "self_similarity": 0.25, "distinct_responses": 1.0, "distinct_answers": 2 / 3}
    )


def test_equal_responses_and_a_single_one():
    assert group_diversity([[1, 2]] * 4) == {"edit_distance": 0, "self_similarity": 1, "distinct_responses": 0.25}
    assert group_diversity([[1, 2]]) == {"edit_distance": 0, "self_similarity": 1, "distinct_responses": 1}
    assert group_diversity([[], []])["edit_distance"] == 0
