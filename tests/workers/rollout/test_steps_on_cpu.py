"""Steps end where their text or their length says, and never between a call and its result."""

import random

import pytest

from verl.workers.rollout.steps import add_steps, path_to, split_steps
from verl.workers.rollout.trajectory_tree import TOOL, Segment, TrajectoryTree

MODEL = "model"


def letters(text, author=MODEL):
    tokens = [ord(letter) for letter in text]
    return Segment(None, tokens, None if author == TOOL else [-float(token) for token in tokens], author)


def texts(steps):
    return [[("".join(map(chr, segment.token_ids)), segment.author) for segment in step] for step in steps]


@pytest.mark.parametrize(
    ("segments", "delimiter", "most", "expected"),
    [
        ([("ab.c.d", MODEL)], ".", None, ["ab.", "c.", "d"]),
        ([("ab.c.", MODEL)], ".", None, ["ab.", "c."]),
        ([("abcdefg", MODEL)], ".", 3, ["abc", "def", "g"]),
        ([("a.bcdefg.h", MODEL)], ".", 4, ["a.", "bcde", "fg.", "h"]),
        ([("a\n\nb\nc", MODEL)], "\n\n", None, ["a\n\n", "b\nc"]),
        ([("call", MODEL), ("<r.>", TOOL), ("end", MODEL)], None, None, ["call|<r.>", "end"]),
        ([("a.call.", MODEL), ("<r.>", TOOL), ("end", MODEL)], ".", None, ["a.", "call.|<r.>", "end"]),
        ([("abcd", MODEL), ("<r>", TOOL), ("efg", MODEL)], ".", 2, ["ab", "cd|<r>", "ef", "g"]),
        ([("ab", MODEL), ("c.d", MODEL)], ".", None, ["ab|c.", "d"]),
    ],
    ids=str,
)
def test_steps_by_hand(segments, delimiter, most, expected):
    steps = split_steps([letters(*each) for each in segments], chr, delimiter, most)
    assert ["|".join(text for text, _ in step) for step in texts(steps)] == expected


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_and_no_call_is_parted_from_its_result(seed):
    draws = random.Random(seed)
    segments = []
    for _ in range(draws.randint(1, 5)):
        segments.append(letters("".join(draws.choices("ab.", k=draws.randint(1, 9)))))
        if draws.random() < 0.5:
            segments.append(letters("<.>", TOOL))
    segments.append(letters("z"))
    steps = split_steps(segments, chr, ".", 4)
    parts = [part for step in steps for part in step]
    for name in ("token_ids", "log_probs"):
        whole = [value for segment in segments for value in getattr(segment, name) or [0.0] * len(segment.token_ids)]
        assert [value for part in parts for value in getattr(part, name) or [0.0] * len(part.token_ids)] == whole
    for step, following in zip(steps, steps[1:], strict=False):
        assert following[0].author == MODEL, "a result is in the step of its call"
        own = "".join(text for text, author in texts([step])[0] if author == MODEL)
        assert step[-1].author == TOOL or own.endswith(".") or len(own) == 4
        assert len(own) <= 4 and "." not in own[:-1]


def test_added_steps_are_segments_of_their_own():
    tree = TrajectoryTree([1])
    ends = add_steps(tree, None, split_steps([letters("ab.cd")], chr, "."))
    again = add_steps(tree, ends[0], [[letters("cd"), letters("<r>", TOOL)], [letters("e")]])
    assert path_to(tree, None).tokens == ()
    assert ["".join(map(chr, path_to(tree, end).tokens)) for end in (*ends, *again)] == [
        "ab.",
        "ab.cd",
        "ab.cd<r>",
        "ab.cd<r>e",
    ]
    assert path_to(tree, again[-1]).calls == 1 and len(tree.segments) == 5
