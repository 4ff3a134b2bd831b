"""How alike two equally long runs of tokens are: what LATR's lookahead pruning compares."""

from collections.abc import Sequence

from rapidfuzz.distance import LCSseq, Levenshtein


def edit_distance_ratio(a: Sequence[int], b: Sequence[int]) -> float:
    """Levenshtein distance / length; 0 for equal runs."""
    return Levenshtein.distance(a, b) / len(a)


def rouge_l(a: Sequence[int], b: Sequence[int]) -> float:
    """ROUGE-L F1: longest common subsequence / length, as both are equally long."""
    return LCSseq.similarity(a, b) / len(a)


def suffix_match(a: Sequence[int], b: Sequence[int]) -> float:
    """Length of the longest suffix of one that occurs in the other, anywhere, / length.

    Two branches that write the same sentence, one a few tokens later, match by it.
    """
    return max(_longest_suffix_inside(a, b), _longest_suffix_inside(b, a)) / len(a)


def _longest_suffix_inside(a: Sequence[int], b: Sequence[int]) -> int:
    # a token becomes a character, so that the search is Python's own
    letter = {token: chr(i) for i, token in enumerate({*a, *b})}
    text, inside = ("".join(letter[token] for token in tokens) for tokens in (a, b))
    longest = 0
    while longest < len(text) and text[-longest - 1 :] in inside:
        longest += 1
    return longest
