"""Decides whether an answer equals a true answer, by the structure of both and the values of their formulas.

This is the judge of answers that it can read. It knows nothing of sympy, and takes about a millisecond.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from mpmath import mp

from verl.utils.reward_score import answer_kinds as kinds
from verl.utils.reward_score.answer_agreement import (
    is_true,
    parts,
    proportionality,
    same_curve,
    symbols,
)
from verl.utils.reward_score.answer_parameters import are_matched, is_domain, same_families, same_function
from verl.utils.reward_score.answer_quantities import (
    chemical_formula,
    same_quantity,
    same_ratio,
    same_words,
    with_unit,
)
from verl.utils.reward_score.answer_sets import is_inequality, is_set, same_set
from verl.utils.reward_score.answer_structure import readings
from verl.utils.reward_score.answer_values import DIGITS, Point, evaluate, number
from verl.utils.reward_score.answer_words import TELLING

_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}


def is_equal(truth: str, answer: str) -> bool:
    """Return whether two texts are the same answer: some reading of one equals some reading of the other.

    Raises:
        Unreadable: a text has a notation that is not read, or a formula whose value is not computed.
    """
    with mp.workdps(DIGITS):
        if chemical_formula(truth) and chemical_formula(truth) == chemical_formula(answer):
            return True
        true_readings, answer_readings = readings(with_unit(truth, answer)), readings(with_unit(answer, truth))
        return any(_same(a, b) for a in true_readings for b in answer_readings)


def _same(truth: kinds.Listing | kinds.Choice, answer: kinds.Listing | kinds.Choice) -> bool:
    if isinstance(truth, kinds.Choice) and isinstance(answer, kinds.Choice):
        return truth.label == answer.label and _same(truth.content, answer.content)
    if isinstance(answer, kinds.Choice):
        return _same(answer, truth)
    letters = _letters(answer)
    if isinstance(truth, kinds.Choice):
        return letters == truth.label if letters else _same(truth.content, answer)
    return (letters is not None and letters == _letters(truth)) or _same_listing(truth, answer)


def _letters(listing: kinds.Listing) -> str | None:
    """Return the letter or letters of multiple choice, such as C, ACD or A, C, D; None for any other answer."""
    formulas = [item for item in listing.items if isinstance(item, kinds.Formula) and not item.unit]
    texts = [formula.text.removesuffix("inbold") for formula in formulas]
    letters = "".join(texts)
    if len(letters) == 1 and len(listing.items) == 1:
        return letters.upper() if letters in "ABCDEFabcdef" else None
    is_list = len(texts) == len(listing.items) and all(len(text) == 1 for text in texts)
    if not letters or not (is_list or (len(listing.items) == 1 and letters == "".join(sorted(letters)))):
        return None
    return "".join(sorted(letters)) if set(letters) <= set("ABCDEF") and len(set(letters)) == len(letters) else None


def _same_listing(truth: kinds.Listing, answer: kinds.Listing) -> bool:
    truth, answer = _without_domains(truth, answer)
    truth, answer = _without_indices(truth, answer), _without_indices(answer, truth)
    if same_items(truth.items, answer.items) or same_families(truth, answer):
        return True
    if len(truth.items) + len(answer.items) > 2 and is_set(truth) and is_set(answer) and same_set(truth, answer):
        return True
    return _same_as_list(truth, answer, same_item) or _same_as_list(answer, truth, lambda a, b: same_item(b, a))


def _same_as_list(single: kinds.Listing, several: kinds.Listing, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether the elements of a single set or tuple are the items of a list, for a tuple in their order."""
    members = _members(single.items[0]) if len(single.items) == 1 else None
    if members is None:
        return False
    items, in_order = members
    names = {item.sides[0] for item in several.items if isinstance(item, kinds.Chain)}
    if in_order:
        others = _by_coordinate(several.items)
        return len(items) > 1 and not several.with_or and same_in_order(items, others, same)
    is_set_of_sets = len(items) == 1 and (
        isinstance(items[0], kinds.NamedSet) or getattr(items[0], "opening", "") == "{"
    )
    has_names = any(isinstance(item, kinds.Chain) for item in items)
    return not is_set_of_sets and (has_names or len(names) < 2) and same_items(items, several.items, same)


def _by_coordinate(items: tuple) -> tuple:
    """Return the equations x = ..., y = ..., z = ... in this order; any other items as they are."""
    names = [getattr(item.sides[0], "text", "") if isinstance(item, kinds.Chain) else "" for item in items]
    if set(names) <= {"x", "y", "z"} and len(set(names)) == len(names):
        return tuple(item for _, item in sorted(zip(names, items, strict=True), key=lambda pair: pair[0]))
    return items


def _members(structure: Any) -> tuple[tuple, bool] | None:
    """Return the elements of a set or tuple that may stand for a list of them, and whether their order counts."""
    if isinstance(structure, kinds.Chain) and structure.relations in (("=",), ("in",)):
        left, right = structure.sides
        if (
            isinstance(left, kinds.Bracketed)
            and isinstance(right, kinds.Bracketed)
            and len(left.items) == len(right.items)
        ):
            return tuple(kinds.Chain((a, b), ("=",)) for a, b in zip(left.items, right.items, strict=True)), False
        return _members(right) if isinstance(left, kinds.Formula) and left.tree[0] in ("symbol", "unknown") else None
    if isinstance(structure, kinds.Listing):
        return structure.items, False
    if isinstance(structure, kinds.Bracketed):
        if structure.opening == "{":
            return structure.items, False
        return (structure.items, True) if (structure.opening, structure.closing) == ("(", ")") else None
    return None


def _without_indices(listing: kinds.Listing, other: kinds.Listing) -> kinds.Listing:
    """Return the equations x_1 = ..., x_2 = ... as x = ..., if the other listing has x = ... only."""
    names = [
        [getattr(item.sides[0], "text", "") for item in each.items if isinstance(item, kinds.Chain)]
        for each in (listing, other)
    ]
    if len(set(names[1])) != 1 or not names[1][0]:
        return listing
    base = names[1][0]
    if sorted(names[0]) != [f"{base}_{place + 1}" for place in range(len(listing.items))]:
        return listing
    name = kinds.Formula(("symbol", base), text=base)
    items = tuple(kinds.Chain((name, *item.sides[1:]), item.relations) for item in listing.items)
    return kinds.Listing(items, listing.with_or)


def _without_domains(truth: kinds.Listing, answer: kinds.Listing) -> tuple[kinds.Listing, kinds.Listing]:
    """Return the listings without conditions such as k in Z, if only one of them has such."""

    def without(listing: kinds.Listing) -> kinds.Listing:
        rest = tuple(item for item in listing.items if not is_domain(item))
        return kinds.Listing(rest or listing.items, listing.with_or)

    first, second = without(truth), without(answer)
    has_both = len(first.items) < len(truth.items) and len(second.items) < len(answer.items)
    return (truth, answer) if has_both else (first, second)


def same_items(first: tuple, second: tuple, same: Callable[[Any, Any], bool] | None = None) -> bool:
    """Return whether the items are the same in any order, or in order if only one has names for several things."""
    if len(first) != len(second):
        return False
    same = same or same_item
    names = [{item.sides[0] for item in items if isinstance(item, kinds.Chain)} for items in (first, second)]
    if bool(names[0]) != bool(names[1]) and not _say_the_same(*names):
        return same_in_order(first, second, same)
    return are_matched(first, second, same)


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
    if isinstance(truth, kinds.Chain) or isinstance(answer, kinds.Chain):
        return _same_chain(truth, answer)
    if isinstance(truth, kinds.Ratio) or isinstance(answer, kinds.Ratio):
        return same_ratio(truth, answer)
    if isinstance(truth, kinds.Formula) and isinstance(answer, kinds.Formula):
        return same_quantity(truth, answer)
    if isinstance(truth, kinds.Words) or isinstance(answer, kinds.Words):
        return same_words(truth, answer)
    rules: dict[type, Callable[[Any, Any], bool]] = {
        kinds.Bracketed: _same_bracketed,
        kinds.NamedSet: lambda a, b: a.name == b.name,
        kinds.Phrase: lambda a, b: same_in_order(a.parts, b.parts),
        kinds.Listing: lambda a, b: same_items(a.items, b.items),
        kinds.Builder: _same_builder,
        kinds.SetOperation: _same_operation,
    }
    if type(truth) is type(answer) and rules[type(truth)](truth, answer):
        return True
    for one, other in ((truth, answer), (answer, truth)):
        if isinstance(one, kinds.Bracketed) and one.opening == "{" and isinstance(other, kinds.Formula):
            return len(one.items) == 1 and same_item(one.items[0], other)
    return is_set(truth) and is_set(answer) and same_set(truth, answer)


def _same_builder(truth: kinds.Builder, answer: kinds.Builder) -> bool:
    if not same_items(truth.conditions.items, answer.conditions.items):
        return False
    heads = [kinds.Listing((builder.head, *builder.conditions.items)) for builder in (truth, answer)]
    return same_item(truth.head, answer.head) or same_families(*heads)


def _same_operation(truth: kinds.SetOperation, answer: kinds.SetOperation) -> bool:
    if truth.operator != answer.operator:
        return False
    first, second = (_operands(operation, truth.operator) for operation in (truth, answer))
    return same_in_order(first, second) if truth.operator == "minus" else same_items(first, second)


def _operands(structure: Any, operator: str) -> tuple:
    """Return the operands of a union of unions or an intersection of intersections; of a difference, both sides."""
    if not isinstance(structure, kinds.SetOperation) or structure.operator != operator:
        return (structure,)
    sides = (structure.left, structure.right)
    return sides if operator == "minus" else tuple(part for side in sides for part in _operands(side, operator))


def _same_congruence(truth: kinds.Chain, answer: kinds.Chain) -> bool:
    """Return whether x = a (mod m) and x = b (mod m) are the same for numbers a, b and m."""
    if not same_item(truth.sides[0], answer.sides[0]):
        return False
    values = []
    for chain in (truth, answer):
        content = chain.sides[1].parts if isinstance(chain.sides[1], kinds.Phrase) else ()
        numbers = [part.tree for part in content if isinstance(part, kinds.Formula) and not symbols(part.tree)]
        if len(content) != 3 or content[1] != kinds.Words("mod") or len(numbers) != 2:
            return False
        values.append([evaluate(tree, Point(0)) for tree in numbers])
    (residue, modulus), (other_residue, other_modulus) = values
    are_exact = all(isinstance(value, Fraction) for value in values[0] + values[1])
    return are_exact and modulus == other_modulus != 0 and (residue - other_residue) % modulus == 0


def _same_bracketed(truth: kinds.Bracketed, answer: kinds.Bracketed) -> bool:
    if (truth.opening, truth.closing) != (answer.opening, answer.closing):
        return False
    if truth.opening == "{":
        return same_items(_distinct(truth.items), _distinct(answer.items))
    return same_in_order(truth.items, answer.items)


def _same_chain(truth: Any, answer: Any) -> bool:
    if not isinstance(truth, kinds.Chain) or not isinstance(answer, kinds.Chain):
        chain, other = (truth, answer) if isinstance(truth, kinds.Chain) else (answer, truth)
        value = _value_of(chain)
        if value is not None:
            return same_item(value, other) if chain is truth else same_item(other, value)
        return is_set(truth) and is_set(answer) and same_set(truth, answer)
    if is_inequality(truth) and is_inequality(answer):
        return _same_inequality(truth, answer)
    if set(truth.relations) == set(answer.relations) == {"="}:
        return _same_equation(truth, answer)
    if truth.relations == answer.relations == ("equiv",) and _same_congruence(truth, answer):
        return True
    if truth.relations == answer.relations:
        return same_in_order(truth.sides, answer.sides)
    return is_set(truth) and is_set(answer) and same_set(truth, answer)


def _trees(chain: kinds.Chain) -> list[tuple] | None:
    """Return the formulas of the sides; None if one is no formula, or has a unit."""
    are_formulas = all(isinstance(side, kinds.Formula) and side.unit in ("", "degree") for side in chain.sides)
    return [side.tree for side in chain.sides] if are_formulas else None


def _value_of(chain: kinds.Chain) -> Any:
    """Return what an equation gives for a name, or the value of a true equation of numbers; None for any other."""
    if chain.relations == ("in",):
        return chain.sides[1] if getattr(chain.sides[0], "tree", ("",))[0] == "symbol" else None
    if set(chain.relations) != {"="}:
        return None
    constant = [side.tree for side in chain.sides if isinstance(side, kinds.Formula) and not symbols(side.tree)]
    if not is_true(constant):
        return None
    first, *between, last = chain.sides
    if isinstance(last, kinds.Formula) and last.tree[0] in ("symbol", "unknown") and constant and not between:
        return first
    return last if all(_names_a_thing(side) for side in (first, *between)) else None


def _names_a_thing(side: Any) -> bool:
    """Return whether a side can name what an equation gives: no sum with numbers or powers in it can."""
    if isinstance(side, kinds.Phrase):
        return all(_names_a_thing(part) for part in side.parts)
    if isinstance(side, kinds.Words):
        return TELLING.isdisjoint(side.text.split())
    if not isinstance(side, kinds.Formula):
        return True
    tree = side.tree
    if not symbols(tree):
        return True
    terms = [tree]
    while any(term[0] == "add" for term in terms):
        terms = [part for term in terms for part in (term[1:] if term[0] == "add" else (term,))]
    if len(terms) == 1:
        return _has_no_number(tree)
    return all(part[0] not in ("number", "power") for term in terms for part in parts(term))


def _has_no_number(tree: tuple) -> bool:
    """Return whether no number is a factor or a term of a formula: 3 is no value of 2x = 3."""
    if tree[0] in ("add", "multiply", "divide", "negative"):
        return all(_has_no_number(part) for part in tree[1:])
    return _has_no_number(tree[1]) if tree[0] == "power" else tree[0] != "number"


def _gives_a_name(chain: kinds.Chain) -> bool:
    """Return whether one of several right sides is a symbol, so that all sides count, as in a = b = 60."""
    return len(chain.sides) > 2 and any(getattr(side, "tree", ("",))[0] == "symbol" for side in chain.sides[1:])


def _same_equation(truth: kinds.Chain, answer: kinds.Chain) -> bool:
    """Return whether equations say the same: side by side, or by their solutions."""
    if same_in_order(truth.sides, answer.sides):
        return True
    if any(_gives_a_name(chain) for chain in (truth, answer)):
        return same_items(truth.sides, answer.sides)
    first, second = (_trees(chain) for chain in (truth, answer))
    if first and second:
        if same_function(first, second):
            return True
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


def _same_inequality(truth: kinds.Chain, answer: kinds.Chain) -> bool:
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
