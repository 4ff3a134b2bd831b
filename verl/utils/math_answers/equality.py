"""Decides whether an answer equals a true answer, by the structure of both and the values of their formulas.

This is the judge of answers that it can read. It knows nothing of sympy, and takes about a millisecond.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

from mpmath import mp, mpf

from verl.utils.math_answers import kinds
from verl.utils.math_answers.agreement import (
    close,
    parts,
    renamed,
    roots,
    same_curve,
    same_formula,
    same_progression,
    symbols,
)
from verl.utils.math_answers.kinds import BOUND, INTEGER
from verl.utils.math_answers.quantities import chemical_formula, same_quantity, same_words, with_unit
from verl.utils.math_answers.structure import readings
from verl.utils.math_answers.tokens import Unreadable
from verl.utils.math_answers.values import DIGITS, Point, Undefined, Value, evaluate, number
from verl.utils.math_answers.words import TELLING

_DOMAINS = ("Z", "N", "R", "Z+", "N*", "N+", "N^*", "N^+")


def is_equal(truth: str, answer: str) -> bool:
    """Return whether two texts are the same answer: some reading of one equals some reading of the other. Raise
    Unreadable if a text cannot be read, or a formula cannot be computed."""
    with mp.workdps(DIGITS):
        if chemical_formula(truth) and chemical_formula(truth) == chemical_formula(answer):
            return True
        true_readings, answer_readings = readings(with_unit(truth, answer)), readings(with_unit(answer, truth))
        return any(_same(a, b) for a in true_readings for b in answer_readings)


def _same(truth: kinds.Listing, answer: kinds.Listing) -> bool:
    letters, others = (each.label or _letters(each) for each in (truth, answer))
    if letters and others and (letters == others or truth.label or answer.label):
        return letters == others and (not (truth.label and answer.label) or _same_listing(truth, answer))
    return _same_listing(truth, answer)


def _letters(listing: kinds.Listing) -> str:
    """Return the letter or letters of multiple choice, such as C, ACD or A, C, D; empty for other answers."""
    formulas = [item for item in listing.items if isinstance(item, kinds.Formula) and not item.unit]
    text = ",".join(formula.text.removesuffix("inbold") for formula in formulas)
    if len(formulas) < len(listing.items) or not re.fullmatch("[A-F]+|[A-F](,[A-F])+|[a-f]", text):
        return ""
    letters = text.upper().replace(",", "")
    in_order = "".join(sorted(set(letters)))
    return in_order if letters == in_order or ("," in text and len(letters) == len(in_order)) else ""


def _same_listing(truth: kinds.Listing, answer: kinds.Listing) -> bool:
    if truth == answer:
        return True
    truth, answer = _without_domains(truth, answer)
    truth, answer = _without_indices(truth, answer), _without_indices(answer, truth)
    if _same_items(truth.items, answer.items) or _same_progressions(truth, answer):
        return True
    if len(truth.items) + len(answer.items) > 2 and same_set(truth, answer):
        return True
    return _same_as_list(truth, answer) or _same_as_list(answer, truth)


def _without_domains(truth: kinds.Listing, answer: kinds.Listing) -> list[kinds.Listing]:
    """Return the listings without conditions such as k in Z, if only one listing has such conditions."""
    listings = [truth, answer]
    rests = [replace(each, items=tuple(item for item in each.items if not _is_domain(item))) for each in listings]
    if all(rest != each for rest, each in zip(rests, listings, strict=True)):
        return listings
    return [rest if rest.items else each for rest, each in zip(rests, listings, strict=True)]


def _is_domain(item: Any) -> bool:
    match item:
        case kinds.Chain(relations=("in",), sides=(_, kinds.NamedSet(name))):
            return name in _DOMAINS
    return False


def _names(items: tuple) -> list[str | None]:
    """Return the texts of the left sides of equations and inequalities; None for a left side that is no formula."""
    return [getattr(item.sides[0], "text", None) for item in items if isinstance(item, kinds.Chain)]


def _without_indices(listing: kinds.Listing, other: kinds.Listing) -> kinds.Listing:
    """Return the equations x_1 = ..., x_2 = ... as x = ..., if the other listing has only equations x = ...."""
    bases = set(_names(other.items))
    base = next(iter(bases)) if len(bases) == 1 else None
    if not base or sorted(map(str, _names(listing.items))) != [f"{base}_{n + 1}" for n in range(len(listing.items))]:
        return listing
    items = (kinds.Chain((kinds.symbol(base), *item.sides[1:]), item.relations) for item in listing.items)
    return replace(listing, items=tuple(items))


def _same_as_list(single: kinds.Listing, several: kinds.Listing) -> bool:
    """Return whether the elements of a single set or tuple are the items of a list; a tuple's in the same order."""
    if len(single.items) > 1:
        return False
    structure = single.items[0]
    while isinstance(structure, kinds.Chain) and structure.relations in (("=",), ("in",)):
        left, structure = structure.sides
        if isinstance(left, kinds.Bracketed) and isinstance(structure, kinds.Bracketed):
            if len(left.items) != len(structure.items):
                return False
            items = (kinds.Chain(sides, ("=",)) for sides in zip(left.items, structure.items, strict=True))
            return _same_items(tuple(items), several.items)
        if not isinstance(left, kinds.Formula) or left.tree[0] not in ("symbol", "unknown"):
            return False
    if isinstance(structure, kinds.Listing):
        return _same_items(structure.items, several.items)
    names = _names(several.items)
    if getattr(structure, "brackets", "") == "()":
        has_coordinates = set(names) <= set("xyz") and len(set(names)) == len(names) == len(several.items)
        others = tuple(sorted(several.items, key=lambda item: item.sides[0].text)) if has_coordinates else several.items
        return not several.with_or and _same_in_order(structure.items, others)
    if getattr(structure, "brackets", "") != "{}" or len(set(names)) > 1:
        return False
    is_set_of_set = len(structure.items) == 1 and is_set(structure.items[0])
    return not is_set_of_set and _same_items(structure.items, several.items)


def _same_items(first: tuple, second: tuple) -> bool:
    """Return whether the items are the same in any order, or in order if only one side names several things."""
    if len(first) != len(second):
        return False
    counts = [len(set(_names(items))) for items in (first, second)]
    if min(counts) == 0 and max(counts) > 1:
        return _same_in_order(first, second)
    return _are_matched(first, second, _same_item)


def _are_matched(first: Sequence, second: Sequence, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether the items of two sequences of the same length are the same in any order."""
    rest = list(second)
    for item in first:
        place = next((place for place, other in enumerate(rest) if same(item, other)), None)
        if place is None:
            return False
        rest.pop(place)
    return True


def _same_in_order(first: tuple, second: tuple) -> bool:
    return len(first) == len(second) and all(map(_same_item, first, second))


def _same_progressions(truth: kinds.Listing, answer: kinds.Listing) -> bool:
    """Return whether values that depend on a parameter in Z are the same up to the parameter's shift and sign."""
    progressions = [_progressions(listing) for listing in (truth, answer)]
    names = {name for formulas in progressions for name, _ in formulas if name}
    if not all(progressions) or len(names) > 1 or len(progressions[0]) != len(progressions[1]):
        return False
    trees, others = ([tree for _, tree in formulas] for formulas in progressions)
    return _are_matched(trees, others, partial(same_progression, name=INTEGER))


def _progressions(listing: kinds.Listing) -> list[tuple[str, tuple]]:
    """Return the names and formulas of values that each depend on a parameter in Z; empty for other listings."""
    formulas: list[tuple[str, tuple]] = []
    for item in listing.items:
        match item:
            case kinds.Formula(tree=tree):
                formulas.append(("", tree))
            case kinds.Chain(sides=(kinds.Formula(text=name), kinds.Formula(tree=tree)), relations=("=",)):
                formulas.append((name, tree))
            case _ if not _is_domain(item):
                return []
    depend = len(formulas) < len(listing.items) and all(("symbol", INTEGER) in parts(tree) for _, tree in formulas)
    return formulas if depend else []


def _same_item(truth: Any, answer: Any) -> bool:
    """Return whether two structures, neither of which is an answer's list, are the same."""
    are_chains = [isinstance(side, kinds.Chain) for side in (truth, answer)]
    if all(are_chains) or any(are_chains) and not (kinds.is_operation(truth) or kinds.is_operation(answer)):
        return _same_chain(truth, answer)
    if isinstance(truth, kinds.Words) or isinstance(answer, kinds.Words):
        return same_words(truth, answer)
    match (truth, answer):
        case (kinds.Formula(), kinds.Formula()):
            return same_quantity(truth, answer)
        case (kinds.Phrase(), kinds.Phrase()):
            return _same_in_order(truth.parts, answer.parts)
        case (kinds.NamedSet(), kinds.NamedSet()) if truth == answer:
            return True
        case (kinds.Bracketed(), kinds.Bracketed()) if truth.brackets != answer.brackets:
            return False
        case (kinds.Bracketed(), kinds.Bracketed()) if truth.brackets == "{}":
            return all(any(_same_item(a, b) for b in answer.items) for a in truth.items) and all(
                any(_same_item(a, b) for a in truth.items) for b in answer.items
            )
        case (kinds.Bracketed(), kinds.Bracketed()):
            return _same_in_order(truth.items, answer.items)
        case (kinds.Builder(), kinds.Builder()) if _same_builder(truth, answer):
            return True
    return same_set(truth, answer)


def _same_builder(truth: kinds.Builder, answer: kinds.Builder) -> bool:
    if not _same_items(truth.conditions.items, answer.conditions.items):
        return False
    heads = [kinds.Listing((builder.head, *builder.conditions.items)) for builder in (truth, answer)]
    return _same_item(truth.head, answer.head) or _same_progressions(*heads)


def _same_chain(truth: Any, answer: Any) -> bool:
    are_chains = [isinstance(side, kinds.Chain) and not kinds.is_operation(side) for side in (truth, answer)]
    if are_chains[0] != are_chains[1]:
        chain, other = (truth, answer) if are_chains[0] else (answer, truth)
        value = _value_of(chain)
        if value is not None:
            return _same_item(value, other)
    elif set(truth.relations) == set(answer.relations) == {"="}:
        return _same_equation(truth, answer)
    elif truth.relations == answer.relations:
        is_symmetric = len(set(truth.relations)) == 1 and truth.relations[0] in ("cup", "cap", "!=")
        if (_same_items if is_symmetric else _same_in_order)(truth.sides, answer.sides):
            return True
    return same_set(truth, answer)


def _trees(chain: kinds.Chain) -> list[tuple]:
    """Return the formulas of the sides; an empty list if a side is no formula, or has a unit other than degrees."""
    are_formulas = all(isinstance(side, kinds.Formula) and side.unit in ("", "degree") for side in chain.sides)
    return [side.tree for side in chain.sides] if are_formulas else []


def _are_true(*equations: list[tuple]) -> bool:
    """Return whether all sides of each equation that have no symbols have the same value."""
    numbers = [[side for side in sides if not symbols(side)] for sides in equations]
    return all(same_formula(left, right) for sides in numbers for left, right in pairwise(sides))


def _value_of(chain: kinds.Chain) -> Any:
    """Return the value that an equation gives to a name, or the value of a true equation of numbers; else None."""
    *names, value = chain.sides
    formulas = [side.tree for side in chain.sides if isinstance(side, kinds.Formula)]
    if set(chain.relations) != {"="} or not _are_true(formulas):
        return None
    if not symbols(*formulas[:1]) and formulas[-1:] and formulas[-1][0] in ("symbol", "unknown"):  # 5 = x
        return names[0] if len(names) == 1 else None
    return value if all(map(_names_a_thing, names)) else None


def _names_a_thing(side: Any) -> bool:
    """Return whether a side can be the name of an equation's value; a sum with numbers or powers cannot."""
    if isinstance(side, kinds.Phrase):
        return all(map(_names_a_thing, side.parts))
    if isinstance(side, kinds.Words):
        return TELLING.isdisjoint(side.text.split())
    if not isinstance(side, kinds.Formula) or not symbols(side.tree):
        return True
    if side.tree[0] == "add":
        return all(part[0] not in ("number", "power") for part in parts(side.tree))
    return _has_no_number(side.tree)


def _has_no_number(tree: tuple) -> bool:
    """Return whether no number is a factor or a term of a formula; 2x has the factor 2, so 2x = 3 names no value."""
    if tree[0] in ("add", "multiply", "divide", "negative"):
        return all(map(_has_no_number, tree[1:]))
    return _has_no_number(tree[1]) if tree[0] == "power" else tree[0] != "number"


def _gives_a_name(chain: kinds.Chain) -> bool:
    """Return whether one of several right sides is a symbol, so that all sides count, as in a = b = 60."""
    return len(chain.sides) > 2 and any(getattr(side, "tree", ("",))[0] == "symbol" for side in chain.sides[1:])


def _same_equation(truth: kinds.Chain, answer: kinds.Chain) -> bool:
    """Return whether two equations are the same: their sides are, or their solutions."""
    if _gives_a_name(truth) or _gives_a_name(answer):
        return _same_items(truth.sides, answer.sides)
    first, second = _trees(truth), _trees(answer)
    if first and second:
        if _same_function(first, second):
            return True
        if not _are_true(first, second) or bool(symbols(*first)) != bool(symbols(*second)):
            return False
    ends, others = [(chain.sides[0], chain.sides[-1]) for chain in (truth, answer)]
    if _same_in_order(ends, others) or _same_in_order(ends, others[::-1]):
        return True
    return len(first) == len(second) == 2 and same_curve(first, second)


def _same_function(first: list[tuple], second: list[tuple]) -> bool:
    """Return whether f(x) = ... and f(t) = ... define the same function."""
    match first, second:
        case [("unknown", f, ("symbol", _) as x), body], [("unknown", g, ("symbol", _) as t), other_body] if f == g:
            are_bound = x in parts(body) and t in parts(other_body)
            are_new = x not in parts(other_body) and t not in parts(body)
            return are_bound and are_new and same_formula(body, renamed(other_body, t, x))
    return False


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
