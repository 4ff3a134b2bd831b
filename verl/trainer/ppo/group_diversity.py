"""Measures the diversity of a prompt group's responses, which tree rollouts are meant to raise."""

import math
import random
from collections.abc import Hashable, Sequence
from itertools import combinations

MAX_PAIRS = 28  # default of trainer.diversity_pairs: all pairs of 8 responses
LONG_RESPONSE = 4096  # tokens; a pair takes a CPU 2 ms, and the square of that for longer ones


def compared_pairs(responses: Sequence[Sequence[int]], max_pairs: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return all pairs of responses, or `max_pairs` of them if there are more, drawn at random with a seed from the
    responses. If the longest response has k > 1 times `LONG_RESPONSE` tokens, the limit is `max_pairs` / k^2."""
    pairs = list(combinations(responses, 2))
    times_longer = max(map(len, responses), default=0) / LONG_RESPONSE
    limit = max(1, math.floor(max_pairs / max(1.0, times_longer) ** 2))
    return pairs if len(pairs) <= limit else random.Random(sum(map(len, responses))).sample(pairs, limit)


def group_diversity(
    responses: Sequence[Sequence[int]], answers: Sequence[Hashable] | None = None, max_pairs: int = MAX_PAIRS
) -> dict[str, float]:
    """Return the diversity of n responses to one prompt.

    `edit_distance`, `self_similarity`: means over `compared_pairs` of Levenshtein distance and longest common
        subsequence / length of the longer one; of a single response 0 and 1.
    `distinct_responses`, `distinct_answers`: number of different ones / n. Without `answers`, those read off the
        responses, the second is left out; all missing ones (None) count as one.
    """
    from rapidfuzz.distance import LCSseq, Levenshtein

    pairs = compared_pairs(responses, max_pairs)
    n = len(responses)
    metrics = {
        "edit_distance": sum(Levenshtein.normalized_distance(a, b) for a, b in pairs) / len(pairs) if pairs else 0.0,
        "self_similarity": sum(LCSseq.normalized_similarity(a, b) for a, b in pairs) / len(pairs) if pairs else 1.0,
        "distinct_responses": len({tuple(response) for response in responses}) / n,
    }
    if answers is not None:
        metrics["distinct_answers"] = len(set(answers)) / n
    return metrics
