"""Compares sets of real numbers: intervals, unions, inequalities and set-builders.

A set consists of a function that returns whether a number is in it, and of the numbers at which the function's result
can change. Two sets are equal if they agree at all these numbers, between them, and beyond them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from mpmath import mp, mpf

from verl.utils.math_answers import kinds
from verl.utils.math_answers.agreement import close, parts, roots, symbols
from verl.utils.math_answers.kinds import BOUND
from verl.utils.math_answers.tokens import Unreadable
from verl.utils.math_answers.values import Point, Undefined, Value, evaluate, number

MOST_ELEMENTS = 100
_ORDERS = frozenset("< <= > >= !=".split())
_OPERATIONS: dict[str, Callable[[bool, bool], bool]] = {
    "cup": lambda left, right: left or right,
    "cap": lambda left, right: left and right,
    "minus": lambda left, right: left and not right,
}
_INTEGERS = kinds.Chain((kinds.symbol(BOUND), kinds.NamedSet("Z")), ("in",))


@dataclass(frozen=True)
class RealSet:
    """A set of real numbers."""

    contains: Callable[[Value], bool]
    boundaries: list


def is_set(structure: Any) -> bool:
    """Return whether a structure is more likely a set of numbers than a number or a tuple of numbers."""
    if isinstance(structure, kinds.Listing):
        return len(structure.items) == 1 and is_set(structure.items[0]) or _are_inequalities(structure.items)
    if isinstance(structure, kinds.Chain) and structure.relations == ("in",):
        return is_set(structure.sides[1])
    if isinstance(structure, kinds.Chain):
        return kinds.is_operation(structure) or not _ORDERS.isdisjoint(structure.relations)
    return isinstance(structure, kinds.Bracketed | kinds.Builder | kinds.NamedSet)


def _are_inequalities(items: Iterable) -> bool:
    return all(isinstance(item, kinds.Chain) and not kinds.is_operation(item) and is_set(item) for item in items)


def same_set(one: Any, other: Any) -> bool:
    """Return whether two structures are the same set of real numbers; False unless both are certainly such sets. Two
    structures in parentheses or brackets may be tuples, and are never compared as sets."""
    are_tuples = isinstance(one, kinds.Bracketed) and isinstance(other, kinds.Bracketed)
    if are_tuples or not (is_set(one) and is_set(other)) or len(_variables(one) | _variables(other)) > 1:
        return False
    try:
        return all(_agree(_real_set(one, at), _real_set(other, at)) for at in (Point(0), Point(1), Point(2, "mixed")))
    except (Unreadable, Undefined):
        return False


def _variables(structure: Any) -> set[str]:
    """Return the symbols of inequalities; none for a set without a variable outside it."""
    if isinstance(structure, kinds.Listing):
        return set().union(*map(_variables, structure.items))
    if not isinstance(structure, kinds.Chain):
        return set()
    sides = structure.sides[:1] if structure.relations == ("in",) else structure.sides
    return symbols(*(side.tree for side in sides if isinstance(side, kinds.Formula)))


def _agree(first: RealSet, second: RealSet) -> bool:
    distinct: list[Value] = []
    for change in sorted({mp.re(x) for x in first.boundaries + second.boundaries if not mp.isinf(x)}):
        if not distinct or not close(distinct[-1], change):
            distinct.append(change)
    ends = [distinct[0] - 1, *distinct, distinct[-1] + 1] if distinct else [mpf(0)]
    return all(first.contains(x) == second.contains(x) for x in [*ends, *((a + b) / 2 for a, b in pairwise(ends))])


def _real_set(structure: Any, point: Point) -> RealSet:
    """Return the set of real numbers that a structure describes, with the values of symbols at a point."""
    match structure:
        case kinds.Bracketed():
            return _bracketed(structure, [_value(item, point) for item in structure.items])
        case kinds.NamedSet(name="R" | "O" as name):
            return RealSet(lambda x: name == "R", [])
        case kinds.Builder(head=kinds.Formula(tree=("symbol", name)), conditions=conditions) if name == BOUND:
            rest = tuple(item for item in conditions.items if item != _INTEGERS)
            values = _real_set(kinds.Listing(rest, conditions.with_or), point)
            return values if len(rest) == len(conditions.items) else _whole_numbers(values)
        case kinds.Chain(relations=("in",), sides=(kinds.Formula(tree=("symbol", _)), values)):
            return _real_set(values, point)
        case kinds.Chain(relations=operators, sides=sides) if kinds.is_operation(structure):
            return _combined([_real_set(side, point) for side in sides], operators)
        case kinds.Chain(relations=relations, sides=sides):
            return _inequalities(sides, relations, point)
        case kinds.Listing(items=items) if len(items) == 1 or (items and _are_inequalities(items)):
            operator = "cup" if structure.with_or else "cap"
            return _combined([_real_set(item, point) for item in items], [operator] * (len(items) - 1))
    raise Unreadable("no set of numbers")


def _value(structure: Any, point: Point) -> Value:
    value = number(evaluate(structure.tree, point)) if isinstance(structure, kinds.Formula) else mpf("nan")
    if mp.isnan(value) or mp.im(value) != 0:
        raise Undefined("no real number")
    return mp.re(value)


def _bracketed(structure: kinds.Bracketed, values: list[Value]) -> RealSet:
    if structure.brackets == "{}":
        return RealSet(lambda x: any(close(x, value) for value in values), values)
    has_ends = (structure.brackets[0] == "[", structure.brackets[1] == "]")
    if len(values) != 2 or values[0] > values[1] or (close(*values) and not all(has_ends)):
        raise Unreadable("no interval")
    low, high = values

    def contains(x: Value) -> bool:
        return has_ends[0] if close(x, low) else has_ends[1] if close(x, high) else low < x < high

    return RealSet(contains, values)


def _whole_numbers(values: RealSet) -> RealSet:
    """Return the whole numbers of a bounded set."""
    ends = [x for x in values.boundaries if not mp.isinf(x)] or [mpf(0)]
    low, high = int(mp.floor(min(ends))), int(mp.ceil(max(ends)))
    if high - low > MOST_ELEMENTS or values.contains(mpf(low - 1)) or values.contains(mpf(high + 1)):
        raise Unreadable("too many whole numbers")
    elements = [mpf(x) for x in range(low, high + 1) if values.contains(mpf(x))]
    return RealSet(lambda x: any(close(x, element) for element in elements), elements)


def _combined(sets: list[RealSet], operators: Iterable[str]) -> RealSet:
    """Return the result of operators between sets, applied from left to right."""
    first, *rest = sets

    def contains(x: Value) -> bool:
        result = first.contains(x)
        for operator, other in zip(operators, rest, strict=True):
            result = _OPERATIONS[operator](result, other.contains(x))
        return result

    return RealSet(contains, [x for each in sets for x in each.boundaries])


def _inequalities(sides: tuple, relations: tuple, point: Point) -> RealSet:
    """Return the solutions of a chain of inequalities, linear or quadratic in one variable or its absolute value."""
    trees = [side.tree for side in sides if isinstance(side, kinds.Formula) and side.unit in ("", "degree")]
    names = symbols(*trees)
    name = BOUND if BOUND in names else next(iter(names), "")
    if len(trees) < len(sides) or len(names) != 1 and name != BOUND or not {"=", *_ORDERS}.issuperset(relations):
        raise Unreadable("no inequalities in one variable")
    if ("=" in relations and name != BOUND) or any(part[0] == "unknown" for part in parts(*trees)):
        raise Unreadable("no inequalities in one variable")
    pairs = zip(pairwise(trees), relations, strict=True)
    sets = [_inequality(pair, relation, name, point) for pair, relation in pairs]
    return _combined(sets, ["cap"] * (len(sets) - 1))


def _inequality(trees: tuple[tuple, tuple], relation: str, name: str, point: Point) -> RealSet:
    def values(x: Value) -> list[Value]:
        return [number(evaluate(tree, replace(point, bound={name: x}))) for tree in trees]

    def difference(exponent: int) -> Callable[[Value], Value]:
        """Return the difference of the sides, or of their squares: |x - 2| < 3 changes where (x - 2)^2 is 9."""
        return lambda x: values(x)[0] ** exponent - values(x)[1] ** exponent

    def contains(x: Value) -> bool:
        left, right = map(mp.re, values(x))
        if close(left, right):
            return relation in ("<=", ">=", "=")
        return relation == "!=" or (relation != "=" and (left < right) == relation.startswith("<"))

    if any(mp.isinf(value) for value in values(Fraction(1))):
        return RealSet(contains, [])
    boundaries = roots(difference(1)) or roots(difference(2))
    if boundaries is None:
        raise Unreadable("an inequality of a high degree")
    return RealSet(contains, boundaries)
