"""Measures the diversity of a prompt group's responses, which tree rollouts are meant to raise."""

import random
from collections.abc import Hashable, Sequence
from itertools import combinations

from rapidfuzz.distance import Levenshtein

MAX_PAIRS = 28  # all pairs of 8 responses


def compared_pairs(responses: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return all pairs of responses, or `MAX_PAIRS` of them if there are more, drawn at random with a seed from the
    responses."""
    pairs = list(combinations(responses, 2))
    return pairs if len(pairs) <= MAX_PAIRS else random.Random(sum(map(len, responses))).sample(pairs, MAX_PAIRS)


def group_diversity(responses: Sequence[Sequence[int]], answers: Sequence[Hashable] | None = None) -> dict[str, float]:
    """Return the diversity of n responses to one prompt.

    `edit_distance`: mean over `compared_pairs` of Levenshtein distance / length of the longer one; of a single response
        0.
    `distinct_responses`, `distinct_answers`: number of different ones / n. Without `answers`, those read off the
        responses, the second is left out; all missing ones (None) count as one.
    """
    pairs = compared_pairs(responses)
    n = len(responses)
    metrics = {
        "edit_distance": sum(Levenshtein.normalized_distance(a, b) for a, b in pairs) / len(pairs) if pairs else 0.0,
        "distinct_responses": len({tuple(response) for response in responses}) / n,
    }
    if answers is not None:
        metrics["distinct_answers"] = len(set(answers)) / n
    return metrics
