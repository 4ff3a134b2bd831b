"""Compares sets of real numbers: intervals, unions, inequalities and what set-builders describe.

A set is a function that tells whether a number is in it, and the numbers where that can change. Two sets are equal if
they agree at all these numbers, between them, and beyond them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from itertools import pairwise
from typing import Any

from mpmath import mp, mpf

from verl.utils.reward_score import answer_kinds as kinds
from verl.utils.reward_score.answer_agreement import close, parts, roots, symbols
from verl.utils.reward_score.answer_kinds import BOUND
from verl.utils.reward_score.answer_tokens import Unreadable
from verl.utils.reward_score.answer_values import Point, TooLarge, Undefined, Value, evaluate, number

MOST_ELEMENTS = 100
_ORDERS = frozenset("< <= > >= !=".split())


@dataclass(frozen=True)
class RealSet:
    """A set of real numbers."""

    contains: Callable[[Value], bool]
    boundaries: list


def is_inequality(structure: Any) -> bool:
    return isinstance(structure, kinds.Chain) and not _ORDERS.isdisjoint(structure.relations)


def is_set(structure: Any) -> bool:
    """Return whether a structure reads as a set of numbers, more than as a number or tuple of them."""
    if isinstance(structure, kinds.Listing):
        return len(structure.items) == 1 and is_set(structure.items[0]) or _are_inequalities(structure.items)
    if isinstance(structure, kinds.Chain):
        return is_inequality(structure) or (structure.relations == ("in",) and is_set(structure.sides[1]))
    return isinstance(structure, kinds.Bracketed | kinds.Builder | kinds.SetOperation | kinds.NamedSet)


def _are_inequalities(items: tuple) -> bool:
    return all(isinstance(item, kinds.Chain) and (is_inequality(item) or is_set(item)) for item in items)


def same_set(one: Any, other: Any) -> bool:
    """Return whether two structures are the same set of real numbers; False if one is not known to be such a set.

    What is in parentheses or brackets on both sides can as well be tuples, and is never compared as sets.
    """
    if isinstance(one, kinds.Bracketed) and isinstance(other, kinds.Bracketed):
        return False
    variables = [_variables(structure) for structure in (one, other)]
    if len(set().union(*variables)) > 1:
        return False
    try:
        for point in (Point(0), Point(1), Point(2, "mixed")):
            first, second = real_set(one, point), real_set(other, point)
            if first is None or second is None or not _agree(first, second):
                return False
    except (Unreadable, Undefined, TooLarge):
        return False
    return True


def _variables(structure: Any) -> set[str]:
    """Return the symbols of inequalities; none for a set without a variable outside it."""
    if isinstance(structure, kinds.Listing):
        return set().union(*map(_variables, structure.items))
    if not isinstance(structure, kinds.Chain):
        return set()
    sides = structure.sides[:1] if structure.relations == ("in",) else structure.sides
    return set().union(*(symbols(side.tree) for side in sides if isinstance(side, kinds.Formula)))


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
        case kinds.Bracketed():
            return _bracketed(structure, point)
        case kinds.NamedSet(name="R"):
            return RealSet(lambda x: True, [])
        case kinds.NamedSet(name="O"):
            return RealSet(lambda x: False, [])
        case kinds.SetOperation(operator=operator, left=left, right=right):
            return _combined(operator, real_set(left, point), real_set(right, point))
        case kinds.Builder(
            head=kinds.Formula(tree=("symbol", name)), conditions=kinds.Listing(items=[domain, *rest])
        ) if name == BOUND and rest and _is_in_z(domain):
            return _whole_numbers(real_set(kinds.Listing(tuple(rest)), point))
        case kinds.Builder(head=kinds.Formula(tree=("symbol", name)), conditions=conditions) if name == BOUND:
            return real_set(conditions, point)
        case kinds.Chain(relations=("in",), sides=(kinds.Formula(tree=("symbol", _)), values)):
            return real_set(values, point)
        case kinds.Chain():
            return _inequality(structure, point)
        case kinds.Listing(items=(item,)):
            return real_set(item, point)
        case kinds.Listing(items=items) if _are_inequalities(items):
            sets = [real_set(item, point) for item in items]
            return reduce(partial(_combined, "cup" if structure.with_or else "cap"), sets)
    return None


def _is_in_z(domain: Any) -> bool:
    element = kinds.Formula(("symbol", BOUND), text=BOUND.replace(" ", ""))
    return isinstance(domain, kinds.Chain) and domain.sides == (element, kinds.NamedSet("Z"))


def _value(structure: Any, point: Point) -> Value:
    if not isinstance(structure, kinds.Formula):
        raise Unreadable("an end of an interval that is no number")
    value = number(evaluate(structure.tree, point))
    if mp.im(value) != 0:
        raise Undefined("not real")
    return mp.re(value)


def _bracketed(structure: kinds.Bracketed, point: Point) -> RealSet | None:
    values = [_value(item, point) for item in structure.items]
    if structure.opening == "{":
        return RealSet(lambda x: any(close(x, value) for value in values), list(values))
    if len(values) != 2 or values[0] > values[1]:
        return None
    low, high = values
    if close(low, high) and (structure.opening, structure.closing) != ("[", "]"):
        return None

    def contains(x: Value) -> bool:
        if close(x, low) or close(x, high):
            return (structure.opening == "[") if close(x, low) else (structure.closing == "]")
        return low < x < high

    return RealSet(contains, values)


def _whole_numbers(values: RealSet | None) -> RealSet | None:
    """Return the whole numbers of a bounded set."""
    if values is None or not values.boundaries:
        return None
    low, high = int(mp.floor(min(values.boundaries))), int(mp.ceil(max(values.boundaries)))
    if high - low > MOST_ELEMENTS or values.contains(mpf(low - 1)) or values.contains(mpf(high + 1)):
        return None
    elements = [mpf(x) for x in range(low, high + 1) if values.contains(mpf(x))]
    return RealSet(lambda x: any(close(x, element) for element in elements), elements)


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


def _inequality(chain: kinds.Chain, point: Point) -> RealSet | None:
    """Return the solutions of a chain of inequalities in one variable, linear or quadratic in it or its size."""
    trees = [side.tree for side in chain.sides if isinstance(side, kinds.Formula) and side.unit in ("", "degree")]
    names = set().union(*(symbols(tree) for tree in trees)) if trees else set()
    if len(trees) != len(chain.sides):
        return None
    names = {BOUND} if BOUND in names else names
    if any(part[0] == "unknown" for tree in trees for part in parts(tree)):
        return None
    if len(names) != 1 or any(relation in ("in", "notin") for relation in chain.relations):
        return None
    (name,) = names
    if "=" in chain.relations and name != BOUND:
        return None

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
        return relation in ("<=", ">=", "=")
    return relation == "!=" or (relation != "=" and (left < right) == relation.startswith("<"))
