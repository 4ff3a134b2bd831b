"""Diversity of a group, by hand."""

import pytest

from verl.trainer.ppo.v1.tree_reports import compared_pairs, group_diversity


def test_by_hand():
    # distances 1/4, 4/4, 4/4
    actual = group_diversity([[1, 2, 3, 4], [1, 2, 3, 5], [6, 7, 8, 9]], ["7", "7", None])
    assert actual == pytest.approx({"edit_distance": 0.75, "distinct_responses": 1.0, "distinct_answers": 2 / 3})


def test_equal_responses_and_a_single_one():
    assert group_diversity([[1, 2]] * 4) == {"edit_distance": 0, "distinct_responses": 0.25}
    assert group_diversity([[1, 2]]) == {"edit_distance": 0, "distinct_responses": 1}
    assert group_diversity([[], []])["edit_distance"] == 0


def test_beyond_the_limit_pairs_are_drawn_and_below_it_all_count():
    responses = [[row] * 10 for row in range(9)]
    assert compared_pairs(responses[:8]) == [(a, b) for i, a in enumerate(responses[:8]) for b in responses[i + 1 : 8]]
    drawn = compared_pairs(responses)
    assert len(drawn) == 28 == len({(a[0], b[0]) for a, b in drawn}) and all(a[0] < b[0] for a, b in drawn)
    assert drawn == compared_pairs(responses) != compared_pairs([*responses[:8], [8] * 11])
