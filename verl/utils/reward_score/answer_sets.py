"""Compares sets of real numbers: intervals, unions, inequalities and what set-builders describe.

A set is a function that tells whether a number is in it, and the numbers where that can change. Two sets are equal if
they agree at all these numbers, between them, and beyond them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

from mpmath import mp, mpf

from .answer_agreement import close, parts, roots, symbols
from .answer_kinds import BOUND, Bracketed, Builder, Chain, Formula, Listing, NamedSet, SetOperation
from .answer_tokens import Unreadable
from .answer_values import Point, TooLarge, Undefined, Value, evaluate, number

_ORDERS = frozenset("< <= > >= !=".split())


@dataclass(frozen=True)
class RealSet:
    """A set of real numbers."""

    contains: Callable[[Value], bool]
    boundaries: list


def is_inequality(structure: Any) -> bool:
    return isinstance(structure, Chain) and not _ORDERS.isdisjoint(structure.relations)


def is_set(structure: Any) -> bool:
    """Return whether a structure reads as a set of numbers, more than as a number or tuple of them."""
    if isinstance(structure, Listing):
        return len(structure.items) == 1 and is_set(structure.items[0]) or _are_inequalities(structure.items)
    if isinstance(structure, Chain):
        return is_inequality(structure) or (structure.relations == ("in",) and is_set(structure.sides[1]))
    return isinstance(structure, Bracketed | Builder | SetOperation | NamedSet)


def _are_inequalities(items: tuple) -> bool:
    return all(isinstance(item, Chain) and (is_inequality(item) or is_set(item)) for item in items)


def same_set(one: Any, other: Any) -> bool:
    """Return whether two structures are the same set of real numbers; False if one is not known to be such a set.

    What is in parentheses or brackets on both sides can as well be tuples, and is never compared as sets.
    """
    if isinstance(one, Bracketed) and isinstance(other, Bracketed):
        return False
    try:
        for point in (Point(0), Point(1), Point(2, "mixed")):
            first, second = real_set(one, point), real_set(other, point)
            if first is None or second is None or not _agree(first, second):
                return False
    except (Unreadable, Undefined, TooLarge):
        return False
    return True


def _agree(first: RealSet, second: RealSet) -> bool:
    changes = sorted({mp.re(x) for x in first.boundaries + second.boundaries if not mp.isinf(x)})
    distinct: list[Value] = []
    for change in changes:
        if not distinct or not close(distinct[-1], change):
            distinct.append(change)
    ends = [distinct[0] - 1, *distinct, distinct[-1] + 1] if distinct else [mpf(0)]
    between = [(a + b) / 2 for a, b in pairwise(ends)]
    return all(first.contains(x) == second.contains(x) for x in [*ends, *between])


def real_set(structure: Any, point: Point) -> RealSet | None:
    """Return the set that a structure describes, with the values of symbols at a point; None if it is no set."""
    match structure:
        case Bracketed():
            return _bracketed(structure, point)
        case NamedSet(name="R"):
            return RealSet(lambda x: True, [])
        case NamedSet(name="O"):
            return RealSet(lambda x: False, [])
        case SetOperation(operator=operator, left=left, right=right):
            return _combined(operator, real_set(left, point), real_set(right, point))
        case Builder(head=Formula(tree=("symbol", name)), conditions=conditions) if name == BOUND:
            return real_set(conditions, point)
        case Chain(relations=("in",), sides=(Formula(tree=("symbol", _)), values)):
            return real_set(values, point)
        case Chain():
            return _inequality(structure, point)
        case Listing(items=(item,)):
            return real_set(item, point)
        case Listing(items=items) if _are_inequalities(items):
            sets = [real_set(item, point) for item in items]
            return _any_of(sets) if structure.with_or else _all_of(sets)
    return None


def _value(structure: Any, point: Point) -> Value:
    if not isinstance(structure, Formula):
        raise Unreadable("an end of an interval that is no number")
    value = number(evaluate(structure.tree, point))
    if mp.im(value) != 0:
        raise Undefined("not real")
    return mp.re(value)


def _bracketed(structure: Bracketed, point: Point) -> RealSet | None:
    values = [_value(item, point) for item in structure.items]
    if structure.opening == "{":
        return RealSet(lambda x: any(close(x, value) for value in values), list(values))
    if len(values) != 2 or values[0] > values[1]:
        return None
    low, high = values

    def contains(x: Value) -> bool:
        if close(x, low) or close(x, high):
            is_end = [close(x, low) and structure.opening == "[", close(x, high) and structure.closing == "]"]
            return low <= high and any(is_end) and (not close(low, high) or all(is_end))
        return low < x < high

    return RealSet(contains, values)


def _combined(operator: str, left: RealSet | None, right: RealSet | None) -> RealSet | None:
    if left is None or right is None:
        return None
    a, b = left.contains, right.contains
    rules: dict[str, Callable[[Value], bool]] = {
        "cup": lambda x: a(x) or b(x),
        "cap": lambda x: a(x) and b(x),
        "minus": lambda x: a(x) and not b(x),
    }
    return RealSet(rules[operator], left.boundaries + right.boundaries)


def _all_of(sets: list[RealSet | None]) -> RealSet | None:
    whole = sets[0]
    for part in sets[1:]:
        whole = _combined("cap", whole, part)
    return whole


def _any_of(sets: list[RealSet | None]) -> RealSet | None:
    whole = sets[0]
    for part in sets[1:]:
        whole = _combined("cup", whole, part)
    return whole


def _inequality(chain: Chain, point: Point) -> RealSet | None:
    """Return the solutions of a chain of inequalities in one variable, linear or quadratic in it or its size."""
    trees = [side.tree for side in chain.sides if isinstance(side, Formula)]
    names = set().union(*(symbols(tree) for tree in trees)) if trees else set()
    if len(trees) != len(chain.sides):
        return None
    names = {BOUND} if BOUND in names else names
    if any(part[0] == "unknown" for tree in trees for part in parts(tree)):
        return None
    if len(names) != 1 or any(relation in ("in", "notin", "=") for relation in chain.relations):
        return None
    (name,) = names

    def value(place: int, x: Any) -> Any:
        return number(evaluate(trees[place], Point(point.number, point.signs, bound={**point.bound, name: x})))

    def difference(place: int, exponent: int, x: Any) -> Value:
        """Return the difference of two sides, or of their squares: |x - 2| < 3 changes where (x - 2)^2 is 9."""
        return value(place, x) ** exponent - value(place + 1, x) ** exponent

    boundaries: list[Any] = []
    for place in range(len(trees) - 1):
        ends = [value(place + step, Fraction(1)) for step in (0, 1)]
        if any(mp.isinf(end) for end in ends):
            continue
        solutions = roots(partial(difference, place, 1)) or roots(partial(difference, place, 2))
        if solutions is None:
            return None
        boundaries += solutions

    def contains(x: Value) -> bool:
        sides = [mp.re(value(place, x)) for place in range(len(trees))]
        return all(_holds(a, relation, b) for a, relation, b in zip(sides, chain.relations, sides[1:], strict=False))

    return RealSet(contains, boundaries)


def _holds(left: Value, relation: str, right: Value) -> bool:
    if close(left, right):
        return relation in ("<=", ">=")
    return relation == "!=" or (left < right) == relation.startswith("<")
