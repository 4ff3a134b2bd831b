"""Decides whether answers are the same up to the name of a parameter, or its shift by a whole number."""

from collections.abc import Callable, Sequence
from typing import Any

from verl.utils.reward_score.answer_agreement import parts, renamed, same_formula, same_progression
from verl.utils.reward_score.answer_kinds import INTEGER, Chain, Formula, Listing, NamedSet


def are_matched(first: Sequence, second: Sequence, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether the items of two sequences of the same length are the same in any order."""
    rest = list(second)
    for item in first:
        place = next((place for place, other in enumerate(rest) if same(item, other)), None)
        if place is None:
            return False
        rest.pop(place)
    return not rest


def is_domain(item: Any) -> bool:
    return (
        isinstance(item, Chain)
        and item.relations == ("in",)
        and isinstance(item.sides[1], NamedSet)
        and item.sides[1].name in ("Z", "N", "R", "Z+", "N*", "N+", "N^*", "N^+")
    )


def _families(listing: Listing) -> tuple[set[str], list[tuple]] | None:
    """Return the names and formulas of values that each depend on a parameter in Z; None for any other listing."""
    names: set[str] = set()
    trees: list[tuple] = []
    items = [item for item in listing.items if not is_domain(item)]
    for item in items:
        is_equation = isinstance(item, Chain) and item.relations == ("=",)
        sides = item.sides if is_equation else (Formula((), text=""), item)
        if not all(isinstance(side, Formula) for side in sides) or ("symbol", INTEGER) not in parts(sides[1].tree):
            return None
        names.add(sides[0].text)
        trees.append(sides[1].tree)
    return (names, trees) if len(items) < len(listing.items) and len(names) == 1 else None


def same_families(truth: Listing, answer: Listing) -> bool:
    """Return whether values that depend on a parameter in Z are the same up to its shift and sign."""
    families = [_families(listing) for listing in (truth, answer)]
    if None in families:
        return False
    (names, trees), (other_names, others) = families  # type: ignore[misc]
    has_same_name = names == other_names or "" in names | other_names
    return has_same_name and are_matched(trees, others, same_progression)


def same_function(first: list[tuple], second: list[tuple]) -> bool:
    """Return whether f(x) = ... and f(t) = ... define the same function."""
    (left, right), (other_left, other_right) = (trees[:2] for trees in (first, second))
    if len(first) != 2 or len(second) != 2 or left[:2] != other_left[:2] or left[0] != "unknown":
        return False
    arguments, others = left[2:], other_left[2:]
    if len(arguments) != 1 or len(others) != 1 or {arguments[0][0], others[0][0]} != {"symbol"}:
        return False
    are_bound = arguments[0] in parts(right) and others[0] in parts(other_right)
    are_new = arguments[0] not in parts(other_right) and others[0] not in parts(right)
    return are_bound and are_new and same_formula(right, renamed(other_right, others[0], arguments[0]))
