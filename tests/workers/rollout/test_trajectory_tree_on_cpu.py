"""TrajectoryTree: shared prefixes are stored once, and every trajectory comes back whole, whatever came first.

The oracle of sharing is a trie of plain prefixes: trajectories share a token where all before it, its author included,
are equal.
"""

import random
from dataclasses import replace

import pytest

from verl.workers.rollout.trajectory_tree import (
    MODEL,
    TOOL,
    Segment,
    SegmentInfo,
    TrajectoryTree,
    add_steps,
    path_to,
    split_steps,
)

SEEDS = range(30)


def test_wrong_segments_are_refused():
    with pytest.raises(IndexError, match="parent 3 of 0"):
        TrajectoryTree([1]).add(Segment(3, [1]))
    with pytest.raises(ValueError, match="2 log_probs for 1 tokens"):
        Segment(None, [1], [0.0, 0.0])
    with pytest.raises(ValueError, match="author='human'"):
        Segment(None, [1], author="human")


# ---- insert and renumbered against a trie of prefixes ----

# (author, tokens, state): a token of the model, or a tool's whole answer with the state after it
Trajectory = tuple[tuple[str, tuple[int, ...], int | None], ...]


def random_trajectories(generator: random.Random) -> list[Trajectory]:
    """Few tokens and states, so that prefixes are shared often; some end within others, some are there twice."""
    made = []
    for _ in range(generator.randint(1, 12)):
        parts: list[tuple] = []
        for turn in range(generator.randint(1, 4)):
            tokens = [generator.randrange(2) for _ in range(generator.randint(1, 4))]
            if turn % 2:
                parts.append((TOOL, tuple(tokens[:2]), generator.choice([None, 1])))
            else:
                parts += [(MODEL, (token,), None) for token in tokens]
        made.append(tuple(parts))
    return made


def log_prob_of(prefix: Trajectory) -> float:
    return -random.Random(str(prefix)).random()


def segments_of(trajectory: Trajectory, begin: int, generator: random.Random) -> list[Segment]:
    """Return the segments from part `begin` on, cut where the author changes and at random."""
    segments: list[Segment] = []
    for i in range(begin, len(trajectory)):
        author, tokens, state = trajectory[i]
        if author == TOOL:
            segments.append(Segment(None, list(tokens), None, TOOL, SegmentInfo(state=state)))
            continue
        if not segments or segments[-1].author != author or generator.random() < 0.2:
            segments.append(Segment(None, [], []))
        segments[-1].token_ids += tokens
        segments[-1].log_probs.append(log_prob_of(trajectory[: i + 1]))
    return segments


def is_the_trie(tree: TrajectoryTree, returned: list[Trajectory], inserted: list[Trajectory]) -> None:
    copy = TrajectoryTree.from_json(tree.to_json())
    assert copy.to_json() == tree.to_json() and copy.trajectories() == tree.trajectories()
    assert tree.trajectories() == [[token for _, tokens, _ in row for token in tokens] for row in returned]
    by_model = [[int(author == MODEL) for author, tokens, _ in row for _ in tokens] for row in returned]
    assert tree.response_masks() == by_model
    assert tree.log_probs() == [
        [
            log_prob_of(row[: i + 1]) if author == MODEL else 0.0
            for i, (author, tokens, _) in enumerate(row)
            for _ in tokens
        ]
        for row in returned
    ]
    at = {}  # prefix -> (segment, offset within it), the same for all rows that have it, another for each other prefix
    for row, ids in zip(returned, tree.segment_ids(), strict=True):
        place = 0
        for i, (_, tokens, _) in enumerate(row):
            where = ids[place], place - ids.index(ids[place])
            assert ids[place : place + len(tokens)] == [ids[place]] * len(tokens)  # an answer is never split
            assert at.setdefault(row[: i + 1], where) == where
            place += len(tokens)
    assert len(set(at.values())) == len(at)
    prefixes = {row[:end] for row in inserted for end in range(1, len(row) + 1)}
    stored = sum(len(segment.token_ids) for segment in tree.segments)
    assert stored == sum(len(prefix[-1][1]) for prefix in prefixes)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_order_of_insertion_the_tree_is_the_trie(seed):
    generator = random.Random(seed)
    trajectories = random_trajectories(generator)
    returned = [generator.randrange(len(trajectories)) for _ in range(generator.randint(1, 8))]
    for _ in range(4):
        tree, index = TrajectoryTree([9]), {}
        for number in generator.sample(range(len(trajectories)), len(trajectories)):
            row = trajectories[number]
            # from the prompt, or from where an earlier trajectory that it continues has ended
            known = [other for other in index if row[: len(trajectories[other])] == trajectories[other]]
            begun = generator.choice([None, *known])
            begin = 0 if begun is None else len(trajectories[begun])
            parent = None if begun is None else index[begun]
            index[number] = tree.insert(parent, segments_of(row, begin, generator))
        tree.leaves = [index[number] for number in range(len(trajectories))]
        is_the_trie(tree, trajectories, trajectories)
        tree.leaves = [index[number] for number in returned]
        is_the_trie(tree.renumbered(), [trajectories[number] for number in returned], trajectories)


def shuffled(tree: TrajectoryTree, generator: random.Random) -> TrajectoryTree:
    """The same tree, its segments made in another order."""
    new, other = {None: None}, TrajectoryTree(tree.prompt_ids, metrics=tree.metrics)
    left = list(range(len(tree.segments)))
    while left:
        i = generator.choice([i for i in left if tree.segments[i].parent in new])
        left.remove(i)
        new[i] = other.add(replace(tree.segments[i], parent=new[tree.segments[i].parent]))
    other.leaves = [new[leaf] for leaf in tree.leaves]
    return other


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_go_depth_first_through_the_trajectories_whoever_was_fast(seed):
    generator = random.Random(seed)
    tree = TrajectoryTree([9])
    leaves = [tree.insert(None, segments_of(row, 0, generator)) for row in random_trajectories(generator)]
    for i, segment in enumerate(tree.segments):
        segment.info.notes["made"] = i
    tree.leaves = generator.sample(leaves, generator.randint(1, len(leaves)))
    numbered = tree.renumbered()
    assert all(shuffled(tree, generator).renumbered() == numbered for _ in range(4))
    assert numbered.renumbered() == numbered
    made = [segment.info.notes["made"] for segment in numbered.segments]
    assert sorted(made) == list(range(len(tree.segments)))

    in_order, reached = [], set()

    def walk(parent):
        """Slowly: the children of a segment in the order of the trajectories through them, then the others."""
        children = [i for i, segment in enumerate(tree.segments) if segment.parent == parent]
        for leaf in tree.leaves:
            for i in set(children) & set(tree.path(leaf)) - reached:
                reached.add(i)
                in_order.append(i)
                walk(i)
        rest = [i for i in children if i not in in_order]
        for i in sorted(rest, key=lambda i: (tree.segments[i].author, tree.segments[i].token_ids)):
            in_order.append(i)
            walk(i)

    walk(None)
    assert made == in_order


def test_a_split_keeps_what_is_known_of_the_segments_end():
    tree = TrajectoryTree([9])
    whole = tree.insert(None, [Segment(None, [1, 2, 3], [-1.0, -2.0, -3.0], info=SegmentInfo(notes={"key": [0]}))])
    after = tree.insert(whole, [Segment(None, [4], [-4.0])])
    inside = tree.insert(None, [Segment(None, [1, 2], [-9.0, -9.0], info=SegmentInfo(notes={"key": [1]}))])
    tree.leaves = [after, inside, whole]
    assert tree.trajectories() == [[1, 2, 3, 4], [1, 2], [1, 2, 3]]
    assert tree.log_probs()[1] == [-1.0, -2.0], "the first one's"
    assert tree.segments[whole].info == SegmentInfo(notes={"key": [0]}) and tree.segments[inside].info == SegmentInfo()


def test_a_trajectory_without_tokens_is_a_segment_of_its_own():
    tree = TrajectoryTree([9])
    tree.leaves = [tree.insert(None, []), tree.insert(None, [Segment(None, [1], [-1.0])])]
    assert tree.trajectories() == tree.renumbered().trajectories() == [[], [1]]


# ---- steps end where their text or their length says, and never between a call and its result ----


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
    read = ["".join(map(chr, path_to(tree, end).tokens)) for end in (*ends, *again)]
    assert read == ["ab.", "ab.cd", "ab.cd<r>", "ab.cd<r>e"]
    assert path_to(tree, again[-1]).calls == 1 and len(tree.segments) == 5
