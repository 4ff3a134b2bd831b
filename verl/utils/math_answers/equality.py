"""Decides whether an answer equals a true answer, by the structure of both and the values of their formulas.

This is the judge of answers that it can read. It knows nothing of sympy, and takes about a millisecond.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from mpmath import mp

from verl.utils.math_answers import kinds
from verl.utils.math_answers.agreement import parts, renamed, same_curve, same_formula, same_progression, symbols
from verl.utils.math_answers.kinds import INTEGER
from verl.utils.math_answers.quantities import chemical_formula, same_quantity, same_words, with_unit
from verl.utils.math_answers.sets import is_set, same_set
from verl.utils.math_answers.structure import readings
from verl.utils.math_answers.values import DIGITS
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
