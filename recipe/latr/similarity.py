"""Similarity of two token sequences of equal length, by which LATR's lookahead pruning compares branches.

rapidfuzz is imported where it is used: every process registers the tree, and few grow it.
"""

from collections.abc import Sequence


def edit_distance_ratio(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the Levenshtein distance / length; 0 for equal sequences."""
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.distance(a, b) / len(a)


def rouge_l(a: Sequence[int], b: Sequence[int]) -> float:
    """Return ROUGE-L F1: longest common subsequence / length, as both are equally long."""
    from rapidfuzz.distance import LCSseq

    return LCSseq.similarity(a, b) / len(a)


def suffix_match(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the length of the longest suffix of one that occurs anywhere in the other, / length: two branches may
    write the same sentence, one a few tokens later."""
    return max(_longest_suffix_inside(a, b), _longest_suffix_inside(b, a)) / len(a)


def _longest_suffix_inside(a: Sequence[int], b: Sequence[int]) -> int:
    # Each token becomes a character, so that Python's own substring search can be used.
    letter = {token: chr(i) for i, token in enumerate({*a, *b})}
    text, inside = ("".join(letter[token] for token in tokens) for tokens in (a, b))
    longest = 0
    while longest < len(text) and text[-longest - 1 :] in inside:
        longest += 1
    return longest
