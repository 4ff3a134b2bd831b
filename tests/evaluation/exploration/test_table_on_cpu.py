"""The numbers of a policy's groups, by hand and by the obvious slow way."""

import random
from dataclasses import replace

import pytest

from recipe.common.reporting.exploration_report import warnings
from verl.evaluation.exploration.table import Certainty, SampledGroup, Trajectory, measure_groups, unique_share


def trajectory(tokens, right, answer, entropies=None) -> Trajectory:
    steps = [None if e is None else Certainty(e, 0.6, 0.3) for e in entropies or [1.0] * len(tokens)]
    return Trajectory(tokens, steps, right, answer)


# half of the first prompt's are right, of the second's all, of the third's none
GROUPS = [
    SampledGroup([1, 2], [trajectory([5, 6], True, "a"), trajectory([5, 7], False, "b")], generated=10),
    SampledGroup([1], [trajectory([5], True, "a"), trajectory([5], True, "a")], generated=4),
    SampledGroup([3], [trajectory([8, 9], False, "c"), trajectory([9, 9], False, "c")], generated=4),
]


def test_numbers_by_hand():
    numbers = measure_groups(GROUPS, 2)
    assert numbers["accuracy"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert numbers["pass@2"] == pytest.approx(2 / 3)
    assert numbers["mixed"] == pytest.approx(1 / 3)
    assert numbers["answers"] == pytest.approx((2 + 1 + 1) / 3)
    assert numbers["branches"] == pytest.approx((2 + 1 + 2) / 3)
    assert numbers["trajectories"] == 2
    assert numbers["tokens"] == 6
    # unique: 1 2 5 6 7 | 1 5 | 3 8 9 9 9 of 8, 4 and 6 tokens
    assert numbers["unique_share"] == pytest.approx((5 + 2 + 5) / (8 + 4 + 6))
    assert numbers["entropy"] == 1.0 and "tool_calls" not in numbers
    called = [replace(group, metrics={"tool_calls": n}) for group, n in zip(GROUPS, (4.0, 0.0, 2.0), strict=True)]
    assert measure_groups(called, 2)["tool_calls"] == 2


def test_responses_that_reach_their_limit_are_cut():
    limited = [replace(group, max_tokens=2) for group in GROUPS]
    assert measure_groups(limited, 2)["cut"] == pytest.approx((1 + 0 + 1) / 3)
    assert measure_groups(GROUPS, 2)["cut"] == 0
    rows = [{"policy": name, **measure_groups(limited, 2)} for name in ("plain T=0.7", "plain T=1.0", "latr")]
    rows[2]["cut"] = 0.0
    assert warnings(rows) == ["warning: 67% or more of plain sampling's responses are cut at data.max_response_length"]
    rows[1]["cut"] = 0.1
    assert warnings(rows) == []


def test_intervals_are_of_prompts():
    numbers = measure_groups(GROUPS, 2)
    # some of the resamplings have only the prompt without a right answer, some only the one with all right
    assert numbers["accuracy-Low"] == 0 and numbers["accuracy-High"] == 1
    alike = measure_groups([GROUPS[0]] * 9, 2)
    assert alike["accuracy-Low"] == alike["accuracy-High"] == 0.5
    assert alike["mixed-Low"] == alike["mixed-High"] == 1


def test_unique_share_is_that_of_different_prefixes():
    draw = random.Random(0)
    groups = []
    for _ in range(20):
        rows = [[draw.randrange(2) for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 5))]
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 3))]
        groups.append(SampledGroup(prompt, [trajectory(row, False, "") for row in rows], 0))
    unique = held = 0
    for group in groups:
        rows = [(*group.prompt_ids, *row.tokens) for row in group.trajectories]
        unique += len({row[:end] for row in rows for end in range(1, len(row) + 1)})
        held += sum(map(len, rows))
    assert unique_share(groups) == pytest.approx(unique / held)


def test_the_entropy_leaves_tools_out():
    rows = [trajectory([1, 2, 3, 4], True, "", [0.0, 1.0, None, 4.0]), trajectory([1, 2], True, "", [2.0, 3.0])]
    groups = [SampledGroup([1], rows[:1], 0), SampledGroup([1], rows[1:], 0)]
    assert measure_groups(groups, 1)["entropy"] == pytest.approx((0 + 1 + 4 + 2 + 3) / 5)
