"""Decides whether an answer equals a true answer, by the structure of both and the values of their formulas.

This is the judge of answers that it can read. It knows nothing of sympy, and takes about a millisecond.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from mpmath import mp

from .answer_agreement import is_true, parts, proportionality, same_curve, same_formula, symbols
from .answer_kinds import (
    Bracketed,
    Builder,
    Chain,
    Choice,
    Formula,
    Listing,
    NamedSet,
    Phrase,
    Ratio,
    SetOperation,
    Words,
)
from .answer_sets import is_inequality, is_set, same_set
from .answer_structure import readings
from .answer_values import DIGITS, Point, TooLarge, Undefined, evaluate, number
from .answer_words import TELLING

_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}


def is_equal(truth: str, answer: str) -> bool:
    """Return whether two texts are the same answer: some reading of one equals some reading of the other.

    Raises:
        Unreadable: a text has a notation that is not read, or a formula whose value is not computed.
    """
    with mp.workdps(DIGITS):
        true_readings, answer_readings = readings(truth), readings(answer)
        return any(_same(a, b) for a in true_readings for b in answer_readings)


def _same(truth: Listing | Choice, answer: Listing | Choice) -> bool:
    if isinstance(truth, Choice) and isinstance(answer, Choice):
        return truth.label == answer.label and _same(truth.content, answer.content)
    if isinstance(truth, Choice):
        return _label(answer) == truth.label or _same(truth.content, answer)
    if isinstance(answer, Choice):
        return _label(truth) == answer.label or _same(truth, answer.content)
    label = _label(truth) or _labels(truth)
    return (label is not None and label == (_label(answer) or _labels(answer))) or _same_listing(truth, answer)


def _label(content: Any) -> str | None:
    """Return the letter of multiple choice that is all of an answer, or None."""
    if isinstance(content, Listing) and len(content.items) == 1 and isinstance(content.items[0], Formula):
        text = content.items[0].text
        return text.upper() if len(text) == 1 and text in "ABCDEFabcdef" and not content.items[0].unit else None
    return None


def _labels(listing: Listing) -> str | None:
    """Return the letters of several choices, such as ACD or A, C, D; None for any other answer."""
    texts = [item.text if isinstance(item, Formula) and not item.unit else "" for item in listing.items]
    letters = "".join(texts)
    is_list = len(texts) > 1 and all(len(text) == 1 for text in texts)
    if not (is_list or (len(texts) == 1 and letters == "".join(sorted(set(letters))))) or len(letters) < 2:
        return None
    return "".join(sorted(letters)) if set(letters) <= set("ABCDEF") and len(set(letters)) == len(letters) else None


def _same_listing(truth: Listing, answer: Listing) -> bool:
    truth, answer = _without_domains(truth, answer)
    truth, answer = _without_indices(truth, answer), _without_indices(answer, truth)
    if same_items(truth.items, answer.items):
        return True
    if len(truth.items) + len(answer.items) > 2 and is_set(truth) and is_set(answer) and same_set(truth, answer):
        return True
    return _same_as_list(truth, answer, same_item) or _same_as_list(answer, truth, lambda a, b: same_item(b, a))


def _same_as_list(single: Listing, several: Listing, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether the elements of a single set or tuple are the items of a list, for a tuple in their order."""
    members = _members(single.items[0]) if len(single.items) == 1 else None
    if members is None:
        return False
    items, in_order = members
    names = {item.sides[0] for item in several.items if isinstance(item, Chain)}
    if in_order:
        others = _by_coordinate(several.items)
        return len(items) > 1 and not several.with_or and same_in_order(items, others, same)
    is_set_of_sets = len(items) == 1 and (isinstance(items[0], NamedSet) or getattr(items[0], "opening", "") == "{")
    has_names = any(isinstance(item, Chain) for item in items)
    return not is_set_of_sets and (has_names or len(names) < 2) and same_items(items, several.items, same)


def _by_coordinate(items: tuple) -> tuple:
    """Return the equations x = ..., y = ..., z = ... in this order; any other items as they are."""
    names = [getattr(item.sides[0], "text", "") if isinstance(item, Chain) else "" for item in items]
    if set(names) <= {"x", "y", "z"} and len(set(names)) == len(names):
        return tuple(item for _, item in sorted(zip(names, items, strict=True), key=lambda pair: pair[0]))
    return items


def _members(structure: Any) -> tuple[tuple, bool] | None:
    """Return the elements of a set or tuple that may stand for a list of them, and whether their order counts."""
    if isinstance(structure, Chain) and structure.relations in (("=",), ("in",)):
        left, right = structure.sides
        if isinstance(left, Bracketed) and isinstance(right, Bracketed) and len(left.items) == len(right.items):
            return tuple(Chain((a, b), ("=",)) for a, b in zip(left.items, right.items, strict=True)), False
        return _members(right) if isinstance(left, Formula) and left.tree[0] in ("symbol", "unknown") else None
    if isinstance(structure, Listing):
        return structure.items, False
    if isinstance(structure, Bracketed):
        if structure.opening == "{":
            return structure.items, False
        return (structure.items, True) if (structure.opening, structure.closing) == ("(", ")") else None
    return None


def _without_indices(listing: Listing, other: Listing) -> Listing:
    """Return the equations x_1 = ..., x_2 = ... as x = ..., if the other listing has x = ... only."""
    names = [
        [getattr(item.sides[0], "text", "") for item in each.items if isinstance(item, Chain)]
        for each in (listing, other)
    ]
    if len(set(names[1])) != 1 or not names[1][0]:
        return listing
    base = names[1][0]
    if sorted(names[0]) != [f"{base}_{place + 1}" for place in range(len(listing.items))]:
        return listing
    name = Formula(("symbol", base), text=base)
    items = tuple(Chain((name, *item.sides[1:]), item.relations) for item in listing.items)
    return Listing(items, listing.with_or)


def _without_domains(truth: Listing, answer: Listing) -> tuple[Listing, Listing]:
    """Return the listings without conditions such as k in Z, if only one of them has such."""

    def without(listing: Listing) -> Listing:
        rest = tuple(item for item in listing.items if not _is_domain(item))
        return Listing(rest or listing.items, listing.with_or)

    first, second = without(truth), without(answer)
    has_both = len(first.items) < len(truth.items) and len(second.items) < len(answer.items)
    return (truth, answer) if has_both else (first, second)


def _is_domain(item: Any) -> bool:
    return (
        isinstance(item, Chain)
        and item.relations == ("in",)
        and isinstance(item.sides[1], NamedSet)
        and item.sides[1].name in ("Z", "N", "R", "Z+", "N*", "N+", "N^*", "N^+")
    )


def same_items(first: tuple, second: tuple, same: Callable[[Any, Any], bool] | None = None) -> bool:
    """Return whether the items are the same in any order, or in order if only one has names for several things."""
    if len(first) != len(second):
        return False
    same = same or same_item
    names = [{item.sides[0] for item in items if isinstance(item, Chain)} for items in (first, second)]
    if bool(names[0]) != bool(names[1]) and not _say_the_same(*names):
        return same_in_order(first, second, same)
    rest = list(second)
    for item in first:
        place = next((place for place, other in enumerate(rest) if same(item, other)), None)
        if place is None:
            return False
        rest.pop(place)
    return True


def same_in_order(first: tuple, second: tuple, same: Callable[[Any, Any], bool] | None = None) -> bool:
    """Return whether the items at each place are the same."""
    same = same or same_item
    return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))


def _say_the_same(*names: set) -> bool:
    """Return whether the items of each list that has names have a single one."""
    texts = [{getattr(name, "text", None) for name in group} for group in names if group]
    return all(len(group) == 1 for group in texts)


def _distinct(items: tuple) -> tuple:
    """Return the elements of a set without repetitions."""
    result: list[Any] = []
    for item in items:
        if not any(same_item(item, other) for other in result):
            result.append(item)
    return tuple(result)


def same_item(truth: Any, answer: Any) -> bool:
    """Return whether two structures, neither of which is an answer's list, are the same."""
    if isinstance(truth, Chain) or isinstance(answer, Chain):
        return _same_chain(truth, answer)
    if isinstance(truth, Ratio) or isinstance(answer, Ratio):
        return _same_ratio(truth, answer)
    if isinstance(truth, Formula) and isinstance(answer, Formula):
        return _same_quantity(truth, answer)
    if isinstance(truth, Words) or isinstance(answer, Words):
        return _same_words(truth, answer)
    rules: dict[type, Callable[[Any, Any], bool]] = {
        Bracketed: _same_bracketed,
        NamedSet: lambda a, b: a.name == b.name,
        Phrase: lambda a, b: same_in_order(a.parts, b.parts),
        Listing: lambda a, b: same_items(a.items, b.items),
        Builder: lambda a, b: same_item(a.head, b.head) and same_items(a.conditions.items, b.conditions.items),
        SetOperation: lambda a, b: a.operator == b.operator and same_in_order((a.left, a.right), (b.left, b.right)),
    }
    if type(truth) is type(answer) and rules[type(truth)](truth, answer):
        return True
    for one, other in ((truth, answer), (answer, truth)):
        if isinstance(one, Bracketed) and one.opening == "{" and isinstance(other, Formula):
            return len(one.items) == 1 and same_item(one.items[0], other)
    return is_set(truth) and is_set(answer) and same_set(truth, answer)


def _same_bracketed(truth: Bracketed, answer: Bracketed) -> bool:
    if (truth.opening, truth.closing) != (answer.opening, answer.closing):
        return False
    if truth.opening == "{":
        return same_items(_distinct(truth.items), _distinct(answer.items))
    return same_in_order(truth.items, answer.items)


def _same_words(truth: Any, answer: Any) -> bool:
    """Return whether words are the same words, or a product of letters that is written as they are."""
    if not all(isinstance(side, Words | Formula) for side in (truth, answer)):
        return False
    if any(isinstance(side, Formula) and (side.unit or not side.text.isalpha()) for side in (truth, answer)):
        return False
    return truth.text.replace(" ", "").lower() == answer.text.replace(" ", "").lower()


def _is_percent(quantity: Formula) -> bool:
    return quantity.unit == "%" or quantity.tree[0] == "percent"


def _same_quantity(truth: Formula, answer: Formula) -> bool:
    """Return whether two quantities are the same: a unit may be left out, and 50 % is 50 and 1/2."""
    percents = [_is_percent(quantity) for quantity in (truth, answer)]
    trees = [quantity.tree[1] if quantity.tree[0] == "percent" else quantity.tree for quantity in (truth, answer)]
    if percents[0] != percents[1]:
        hundredth = ("divide", trees[percents[1]], ("number", Fraction(100), 0))
        if (answer if percents[0] else truth).unit:
            return False
        return same_formula(hundredth, trees[percents[0]]) or (
            not _is_small(trees[percents[1]]) and same_formula(*trees)
        )
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    if truth.text != answer.text and all(_is_name(quantity) for quantity in (truth, answer)):
        return False
    return same_formula(*trees)


def _is_small(tree: tuple) -> bool:
    try:
        return abs(number(evaluate(tree, Point(0)))) <= 1
    except (Undefined, TooLarge):
        return False


def _is_name(quantity: Formula) -> bool:
    """Return whether a formula is letters that name something, such as ABCD, whose order counts."""
    return len(quantity.text) > 2 and quantity.text.isalpha() and quantity.text.isupper()


def _same_ratio(truth: Any, answer: Any) -> bool:
    """Return whether two ratios, or a ratio of two terms and a number, are the same."""
    if not all(isinstance(side, Ratio | Formula) for side in (truth, answer)):
        return False
    if isinstance(truth, Ratio) and isinstance(answer, Ratio):
        if truth.unit and answer.unit and truth.unit != answer.unit:
            return False
        if all(_is_time(ratio.text) for ratio in (truth, answer)):
            return truth.text.lstrip("0") == answer.text.lstrip("0")
        return len(truth.terms) == len(answer.terms) and all(
            same_formula(("divide", truth.terms[0], term), ("divide", answer.terms[0], other))
            for term, other in zip(truth.terms[1:], answer.terms[1:], strict=True)
        )
    if any(isinstance(side, Ratio) and (len(side.terms) != 2 or side.unit) for side in (truth, answer)):
        return False
    trees = [("divide", *side.terms) if isinstance(side, Ratio) else side.tree for side in (truth, answer)]
    return same_formula(*trees)


def _is_time(text: str) -> bool:
    hours, _, minutes = text.partition(":")
    return len(minutes) == 2 and minutes.isdigit() and hours.isdigit() and int(minutes) < 60 and int(hours) <= 24


def _same_chain(truth: Any, answer: Any) -> bool:
    if not isinstance(truth, Chain) or not isinstance(answer, Chain):
        chain, other = (truth, answer) if isinstance(truth, Chain) else (answer, truth)
        value = _value_of(chain)
        if value is not None:
            return same_item(value, other) if chain is truth else same_item(other, value)
        return is_set(truth) and is_set(answer) and same_set(truth, answer)
    if is_inequality(truth) and is_inequality(answer):
        return _same_inequality(truth, answer)
    if set(truth.relations) == set(answer.relations) == {"="}:
        return _same_equation(truth, answer)
    if truth.relations == answer.relations:
        return same_in_order(truth.sides, answer.sides)
    return is_set(truth) and is_set(answer) and same_set(truth, answer)


def _trees(chain: Chain) -> list[tuple] | None:
    return [side.tree for side in chain.sides] if all(isinstance(side, Formula) for side in chain.sides) else None


def _value_of(chain: Chain) -> Any:
    """Return what an equation gives for a name, or the value of a true equation of numbers; None for any other."""
    if chain.relations == ("in",):
        return chain.sides[1] if isinstance(chain.sides[0], Formula) and chain.sides[0].tree[0] == "symbol" else None
    if set(chain.relations) != {"="}:
        return None
    constant = [side.tree for side in chain.sides if isinstance(side, Formula) and not symbols(side.tree)]
    if not is_true(constant):
        return None
    first, *between, last = chain.sides
    if isinstance(last, Formula) and last.tree[0] in ("symbol", "unknown") and constant and not between:
        return first
    return last if all(_names_a_thing(side) for side in (first, *between)) else None


def _names_a_thing(side: Any) -> bool:
    """Return whether a side can name what an equation gives: no sum with numbers or powers in it can."""
    if isinstance(side, Phrase):
        return all(_names_a_thing(part) for part in side.parts)
    if isinstance(side, Words):
        return TELLING.isdisjoint(side.text.split())
    if not isinstance(side, Formula):
        return True
    tree = side.tree
    if not symbols(tree):
        return True
    terms = [tree]
    while any(term[0] == "add" for term in terms):
        terms = [part for term in terms for part in (term[1:] if term[0] == "add" else (term,))]
    if len(terms) == 1:
        return True
    return all(part[0] not in ("number", "power") for term in terms for part in parts(term))


def _same_equation(truth: Chain, answer: Chain) -> bool:
    """Return whether equations say the same: side by side, or by their solutions."""
    if same_in_order(truth.sides, answer.sides):
        return True
    first, second = (_trees(chain) for chain in (truth, answer))
    if first and second:
        constant = [not any(symbols(tree) for tree in trees) for trees in (first, second)]
        if any(constant):
            return all(constant) and is_true(first) and is_true(second) and same_item(truth.sides[-1], answer.sides[-1])
        numbers = [[tree for tree in trees if not symbols(tree)] for trees in (first, second)]
        if not all(is_true(trees) for trees in numbers):
            return False
    ends = [(chain.sides[0], chain.sides[-1]) for chain in (truth, answer)]
    for last in (ends[1], ends[1][::-1]):
        if same_in_order(ends[0], last):
            return True
    if not first or not second or len(first) != 2 or len(second) != 2:
        return False
    return same_curve((first[0], first[1]), (second[0], second[1]))


def _same_inequality(truth: Chain, answer: Chain) -> bool:
    """Return whether inequalities say the same: side by side, in either direction, or by their solutions."""
    if len(truth.sides) == len(answer.sides):
        mirrored = tuple(_MIRRORED.get(relation, relation) for relation in answer.relations[::-1])
        for sides, relations in ((answer.sides, answer.relations), (answer.sides[::-1], mirrored)):
            if truth.relations == relations and same_in_order(truth.sides, sides):
                return True
            first, second = _trees(truth), [getattr(side, "tree", None) for side in sides]
            if truth.relations == relations and first and None not in second and len(first) == 2:
                quotient = proportionality(*(("add", left, ("negative", right)) for left, right in (first, second)))
                if quotient is not None and not mp.im(number(quotient)) and mp.re(number(quotient)) > 0:
                    return True
    return same_set(truth, answer)
