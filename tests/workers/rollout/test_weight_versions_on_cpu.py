"""Which weights made a trajectory: by hand, and on random trees against a look at every token."""

import random

import pytest

from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.weight_versions import NEWEST, OLDEST, WeightVersions


def test_an_interrupted_request_by_hand():
    versions = WeightVersions()
    versions.add([7], Generation([1, 2, 3], [], versions=[(2, 4), (1, 5)]))
    versions.add([7, 1], Generation([8], [], versions=[(1, 6)]))
    assert versions.of([7, 1, 2, 3]) == {OLDEST: 4, NEWEST: 5}
    assert versions.of([7, 1, 2, 9]) == {OLDEST: 4, NEWEST: 5}, "the 9 was a candidate where the second part begins"
    assert versions.of([7, 1, 2, 9], [1, 1, 0]) == {OLDEST: 4, NEWEST: 4}, "a tool has written it"
    assert versions.of([7, 1, 8]) == {OLDEST: 4, NEWEST: 6}
    assert versions.metrics() == {"weight_versions": 3.0}


def test_requests_of_the_same_context_that_begin_alike():
    versions = WeightVersions()
    versions.add([7], Generation([1, 2, 3], [], versions=[(3, 4)]))
    versions.add([7], Generation([1, 5, 6], [], versions=[(3, 6)]))
    versions.add([7, 1], Generation([9], [], versions=[(1, 8)]))
    assert versions.of([7, 1, 2, 3]) == {OLDEST: 4, NEWEST: 4}
    assert versions.of([7, 1, 5, 6]) == {OLDEST: 6, NEWEST: 6}
    assert versions.of([7, 1, 9]) == {OLDEST: 4, NEWEST: 8}, "either may have made the 1"


def test_engines_without_versions():
    versions = WeightVersions()
    versions.add([7], Generation([1, 2], []))
    assert versions.of([7, 1, 2]) == {} and versions.metrics() == {}


def test_tokens_that_no_request_has_made_count_for_all():
    versions = WeightVersions()
    versions.add([7], Generation([1], [], versions=[(1, 4)]))
    versions.add([7], Generation([2], [], versions=[(1, 5)]))
    assert versions.of([7, 3]) == {OLDEST: 4, NEWEST: 5}


def test_a_branch_that_begins_with_another_candidate():
    """Its first token was chosen among those that the first request has reported, and the rest is a second one's."""
    versions = WeightVersions()
    versions.add([7], Generation([1, 2, 3], [], versions=[(1, 4), (2, 5)]))
    versions.add([7, 9], Generation([6], [], versions=[(1, 8)]))
    versions.add([7, 1, 9], Generation([6], [], versions=[(1, 8)]))
    assert versions.of([7, 9, 6]) == {OLDEST: 4, NEWEST: 8}
    versions.add([7, 9, 6], Generation([5], [], versions=[(1, 3)]))
    assert versions.of([7, 9, 6, 4]) == {OLDEST: 3, NEWEST: 8}
    assert versions.of([7, 9, 6, 4], [1, 1, 0]) == {OLDEST: 4, NEWEST: 8}, "a tool has written the 4"


@pytest.mark.parametrize("seed", range(10))
def test_random_trees(seed):
    """Every token that a request writes is new, so that its version can be told by looking at it."""
    rng, versions, fresh = random.Random(seed), WeightVersions(), iter(range(100, 10_000))
    version_of, paths, written = {}, [[1, 2]], set()
    for number in range(30):
        path = rng.choice(paths)
        cut = rng.randint(2, len(path))  # forks are anywhere behind the prompt
        parts = [(rng.randint(1, 3), number // 6 + i) for i in range(rng.randint(1, 2))]
        tokens = [next(fresh) for n, _ in parts for _ in range(n)]
        of_tokens = [version for n, version in parts for _ in range(n)]
        version_of |= dict(zip(tokens, of_tokens, strict=True))
        versions.add(path[:cut], Generation(tokens, [], versions=parts))
        result = [next(fresh)] if rng.random() < 0.3 else []  # a tool's
        written |= set(result)
        paths.append([*path[:cut], *tokens, *result])
    for path in paths[1:]:
        own = [version_of[token] for token in path if token in version_of]
        mask = [int(token not in written) for token in path[2:]]
        assert versions.of(path, mask) == {OLDEST: min(own), NEWEST: max(own)}
