"""Measures the diversity of a prompt group's responses, which tree rollouts are meant to raise."""

from collections.abc import Hashable, Sequence
from itertools import combinations


def group_diversity(responses: Sequence[Sequence[int]], answers: Sequence[Hashable] | None = None) -> dict[str, float]:
    """Return the diversity of n responses to one prompt.

    Args:
        responses: n lists of token ids.
        answers: answer read off each response, or None if it has no answer. Without this argument `distinct_answers`
            is left out.

    Returns:
        `edit_distance`: mean over pairs of Levenshtein distance / length of the longer one, 0 to 1.
        `self_similarity`: mean over pairs of longest common subsequence / length of the longer one, 0 to 1.
        `distinct_responses`, `distinct_answers`: number of different ones / n. All missing answers count as one.
        A single response has edit distance 0 and self-similarity 1.
    """
    from rapidfuzz.distance import LCSseq, Levenshtein

    pairs = list(combinations(responses, 2))
    n = len(responses)
    metrics = {
        "edit_distance": sum(Levenshtein.normalized_distance(a, b) for a, b in pairs) / len(pairs) if pairs else 0.0,
        "self_similarity": sum(LCSseq.normalized_similarity(a, b) for a, b in pairs) / len(pairs) if pairs else 1.0,
        "distinct_responses": len({tuple(response) for response in responses}) / n,
    }
    if answers is not None:
        metrics["distinct_answers"] = len(set(answers)) / n
    return metrics
