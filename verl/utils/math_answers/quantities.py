"""Reads units, in one spelling for each, and decides whether two quantities, ratios or words are the same.

A unit is a power of a few units, so that 50 cm is 0.5 m.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

from verl.utils.math_answers.agreement import same_formula
from verl.utils.math_answers.formula import constant
from verl.utils.math_answers.kinds import Formula, Phrase, Words
from verl.utils.math_answers.tokens import Token
from verl.utils.math_answers.values import Point, Undefined, evaluate, number
from verl.utils.math_answers.words import CONVERSIONS, TELLING, UNIT_SYMBOLS, UNITS

_TIME = re.compile(r"(?:[01]?\d|2[0-4]):[0-5]\d")
COMPOUND = " and parts"  # suffix of the unit of a quantity with several units


def unit_name(words: str) -> str:
    """Return a unit, or any words, in one spelling."""
    spelled = [
        UNITS.get(word)
        or (word if word in UNIT_SYMBOLS or word in CONVERSIONS else UNITS.get(word.lower(), word.lower()))
        for word in words.split()
    ]
    text = " ".join("/" if word == "per" else word for word in spelled)
    text = re.sub(r"\b(?:square|sq) (\S+)", r"\1 ^ 2", text)
    text = re.sub(r"\bcubic (\S+)", r"\1 ^ 3", text)
    return re.sub(r"unit \^ \d", "unit", text)


@cache
def measure(unit: str) -> tuple[Fraction, frozenset]:
    """Return the factor of a unit, and the units in it with their exponents: 5/18, m and s^-1 for km/h."""
    factor = Fraction(1)
    exponents: dict[str, int] = {}
    spelled = unit.removesuffix(COMPOUND).replace("^ - ", "^ -")
    for slash, name, exponent in re.findall(r"(/)?[ *]*([^\s/*^]+)(?: \^ (-?\d))?", spelled):
        base, size = CONVERSIONS.get(name, (name, Fraction(1)))
        power = int(exponent or 1) * (-1 if slash else 1)
        factor *= size**power
        exponents[base] = exponents.get(base, 0) + power
    return factor, frozenset(item for item in exponents.items() if item[1])


def compound(quantities: list[Any]) -> list[Any]:
    """Return the sum of quantities in ever smaller units of a kind, such as 3 h and 20 min; others as they are."""
    if len(quantities) < 2 or not all(isinstance(quantity, Formula) and quantity.unit for quantity in quantities):
        return quantities
    measures = [measure(quantity.unit) for quantity in quantities]
    if len({dimension for _, dimension in measures}) > 1 or any(a <= b for (a, _), (b, _) in pairwise(measures)):
        return quantities
    tree = quantities[0].tree
    for quantity, (factor, _) in zip(quantities[1:], measures[1:], strict=True):
        tree = ("add", tree, ("multiply", quantity.tree, constant(factor / measures[0][0])))
    return [Formula(tree, quantities[0].unit + COMPOUND)]


def quantities(phrase: Phrase) -> list[Any]:
    """Return the quantities of a phrase, added up by `compound` where it can: one for 3 hours 20 minutes. For any other
    phrase, return [phrase]."""
    values, units = phrase.parts[::2], phrase.parts[1::2]
    are_units = all(isinstance(unit, Words) and unit.text in UNITS.values() for unit in units)
    if len(values) != len(units) or not are_units or not all(isinstance(value, Formula) for value in values):
        return [phrase]
    return compound([replace(value, unit=unit.text) for value, unit in zip(values, units, strict=True)])


def is_unit(items: Sequence[Token], before: str = "") -> bool:
    """Return whether tokens behind a number are a unit: words with signs between them, such as km / h ^ 2. Words that
    say more than a unit (TELLING), such as "if", are none. `before` is the text of the token before `items`."""
    for token in items:
        if token.kind == "word":
            is_multiple = token.text[0] in "万亿百千" and token.text not in UNITS
            if is_multiple or not TELLING.isdisjoint(token.text.lower().split()):
                return False
        elif token.kind == "number":
            if before not in ("^", "-"):
                return False
        elif token.text == "{}":
            if not is_unit(token.inner, "^"):
                return False
        elif token.text not in ("/", "^", "*", "times", "-"):
            return False
        before = token.text
    return True


def with_units_as_words(items: list[Token]) -> list[Token]:
    """Return units in parentheses, in a fraction, or as a Greek letter, as words beside each other."""
    result = list(items)
    for place in range(2, len(items)):
        if result[place - 2].kind == "word" and items[place - 1].text == "/" and items[place].text in ("h", "s", "m"):
            result[place] = replace(items[place], kind="word")
    last = items[-1]
    if last.text == "Omega" and items[0].text != "Omega" and items[0].kind in ("number", "group"):
        result[-1] = Token("word", "Ω")
    if last.text == "()" and [token.kind for token in last.inner] == ["word"] and len(items) > 1:
        return [*result[:-1], *last.inner]
    if len(items) > 3 and items[-3].text == "frac" and any(token.kind == "word" for token in items[-2].inner):
        below = [replace(token, text=token.text.replace(" ", " / ")) for token in last.inner]
        return [*result[:-3], *items[-2].inner, Token("sign", "/"), *below]
    return result


def same_words(truth: Any, answer: Any) -> bool:
    """Return whether words or products of letters are the same text, but for case, blanks, article and plural s."""
    if not all(isinstance(side, Words | Formula) for side in (truth, answer)):
        return False
    if any(isinstance(side, Formula) and (side.unit or not side.text.isalpha()) for side in (truth, answer)):
        return False
    return _plain_words(truth.text) == _plain_words(answer.text)


def _plain_words(text: str) -> str:
    """Return words without their article, the s of a plural and blanks."""
    text = re.sub(r"^(?:an?|the) ", "", text.lower()).replace(" ", "")
    return text[:-1] if len(text) > 4 and re.search("[^s]s$", text) else text


def same_quantity(truth: Formula, answer: Formula) -> bool:
    """Return whether two quantities are the same: a unit may be left out, and 50 % is 50 and 1/2."""
    trees, units = (truth.tree, answer.tree), (truth.unit, answer.unit)
    if "ratio" in (truth.tree[0], answer.tree[0]):
        is_number = truth.tree[0] != answer.tree[0]
        return (truth.unit == answer.unit or not (all(units) or is_number)) and _same_ratio(truth, answer)
    (factor, kind), (other_factor, other_kind) = map(measure, units)
    tree = truth.tree if factor == other_factor else ("multiply", truth.tree, constant(factor / other_factor))
    if truth.unit and answer.unit:
        return kind == other_kind and same_formula(tree, answer.tree)
    if "%" in units:
        return same_formula(tree, answer.tree) or (not _is_small(trees[units.index("%")]) and same_formula(*trees))
    are_names = all(re.fullmatch("[A-Z]{3,}", quantity.text) for quantity in (truth, answer))  # ABCD, in this order
    if (are_names and truth.text != answer.text) or "".join(units).endswith(COMPOUND):
        return False
    return same_formula(*trees)


def _is_small(tree: tuple) -> bool:
    try:
        return abs(number(evaluate(tree, Point()))) <= 1
    except Undefined:
        return False


def _same_ratio(truth: Formula, answer: Formula) -> bool:
    """Return whether two ratios, or a ratio of two terms and a number, are the same."""
    sides, texts = (truth, answer), (truth.text, answer.text)
    if all(map(_TIME.fullmatch, texts)):
        return texts[0].lstrip("0") == texts[1].lstrip("0")
    terms, others = (side.tree[1:] if side.tree[0] == "ratio" else (side.tree, constant(1)) for side in sides)
    return len(terms) == len(others) and all(
        same_formula(("divide", terms[0], term), ("divide", others[0], other))
        for term, other in zip(terms[1:], others[1:], strict=True)
    )


def with_unit(text: str, other: str) -> str:
    r"""Return `5 m` as `5\\text{ m}`, a number with a unit, if the other text ends in the same letters set upright.
    Otherwise the letters may be factors, and the text is returned as it is."""
    letters = re.fullmatch(rf"(.*\d)\s*({'|'.join(UNIT_SYMBOLS)})", text.strip())
    if letters and re.search(rf"\\(?:text|mathrm)\s*\{{[\s~]*{letters[2]}\s*\}}\s*$", other):
        return rf"{letters[1]}\text{{ {letters[2]}}}"
    return text


def chemical_formula(text: str) -> str:
    """Return an upright chemical formula with subscripts, such as CO_2, without braces; empty for any other text."""
    plain = re.sub(r"\\(?:mathrm|text|ce)(?![a-z])|[{}\s$]", "", text)
    is_upright = plain != re.sub(r"[{}\s$]", "", text)
    has_subscripts = re.fullmatch(r"(?:[A-Z][a-z]?(?:_\d+)?)*[A-Z][a-z]?_\d(?:[A-Z][a-z]?|_?\d)*", plain)
    return plain if is_upright and has_subscripts else ""
