"""Reads units: in one spelling for each, and as powers of a few units, so that 50 cm is 0.5 m."""

import re
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

from verl.utils.reward_score.answer_brackets import encloses
from verl.utils.reward_score.answer_kinds import Formula, Phrase, Words
from verl.utils.reward_score.answer_tokens import Token
from verl.utils.reward_score.answer_words import CONVERSIONS, TELLING, UNIT_SYMBOLS, UNITS

KNOWN_UNITS = frozenset(UNITS.values())
COMPOUND = " and parts"  # behind the unit of a quantity with several units


def unit_name(words: str) -> str:
    """Return a unit, or any words, in one spelling."""
    spelled = [
        UNITS.get(word)
        or (word if word in UNIT_SYMBOLS or word in CONVERSIONS else UNITS.get(word.lower(), word.lower()))
        for word in words.split()
        if word not in "{}"
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
    """Return the sum of quantities whose units are parts of each other, such as 3 h and 20 min; else the quantities."""
    if not all(isinstance(quantity, Formula) and quantity.unit for quantity in quantities):
        return quantities
    measures = [measure(quantity.unit) for quantity in quantities]
    dimensions = {dimension for _, dimension in measures}
    if len(quantities) < 2 or len(dimensions) > 1 or any(a <= b for (a, _), (b, _) in pairwise(measures)):
        return quantities
    tree = quantities[0].tree
    for quantity, (factor, _) in zip(quantities[1:], measures[1:], strict=True):
        tree = ("add", tree, ("multiply", quantity.tree, ("number", factor / measures[0][0], 0)))
    return [Formula(tree, quantities[0].unit + COMPOUND)]


def quantities(phrase: Phrase) -> list[Any]:
    """Return the quantities of a phrase such as 3 hours 20 minutes; any other phrase as it is."""
    values, units = phrase.parts[::2], phrase.parts[1::2]
    if (
        len(values) == len(units)
        and all(isinstance(value, Formula) for value in values)
        and all(isinstance(unit, Words) and unit.text in KNOWN_UNITS for unit in units)
    ):
        return compound([replace(value, unit=unit.text) for value, unit in zip(values, units, strict=True)])
    return [phrase]


def is_unit(items: list[Token]) -> bool:
    """Return whether tokens behind a number are a unit: words that say no more, and signs between them."""
    for place, token in enumerate(items):
        if token.kind == "word":
            is_multiple = token.text[0] in "万亿百千" and token.text not in UNITS
            if is_multiple or not TELLING.isdisjoint(token.text.lower().split()):
                return False
        elif token.kind == "number":
            if items[place - 1].text not in ("^", "{", "-"):
                return False
        elif token.text not in ("/", "^", "*", "times", "-", "{", "}"):
            return False
    return True


def with_units_as_words(items: list[Token]) -> list[Token]:
    """Return units in parentheses, in a fraction, or as a Greek letter, as words beside each other."""
    result = list(items)
    for place in range(2, len(items)):
        if result[place - 2].kind == "word" and items[place - 1].text == "/" and items[place].text in ("h", "s", "m"):
            result[place] = replace(items[place], kind="word")
    if items[-1].text == "Omega" and (items[0].kind == "number" or items[0].text == "scientific"):
        result[-1] = Token("word", "Ω")
    texts = [token.kind if token.kind == "word" else token.text for token in result]
    if texts[-3:] == ["(", "word", ")"] and len(texts) > 3:
        return [*result[:-3], result[-2]]
    place = len(texts) - texts[::-1].index("frac") - 1 if "frac" in texts else 0
    group = result[place + 1 :]
    end = next((end for end in range(1, len(group)) if encloses(group[: end + 1])), 0)
    if place > 0 and any(token.kind == "word" for token in group[:end]):
        below = [replace(token, text=token.text.replace(" ", " / ")) for token in group[end + 2 : -1]]
        return [*result[:place], *group[1:end], Token("sign", "/"), *below]
    return result
