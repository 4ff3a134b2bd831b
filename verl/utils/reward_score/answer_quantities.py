"""Decides whether two words, quantities with units, percentages, ratios or chemical formulas are the same."""

import re
from fractions import Fraction
from typing import Any

from verl.utils.reward_score.answer_agreement import same_formula
from verl.utils.reward_score.answer_kinds import Formula, Ratio, Words
from verl.utils.reward_score.answer_units import COMPOUND, measure
from verl.utils.reward_score.answer_values import Point, TooLarge, Undefined, evaluate, number
from verl.utils.reward_score.answer_words import UNIT_SYMBOLS


def same_words(truth: Any, answer: Any) -> bool:
    """Return whether words are the same words, or a product of letters that is written as they are."""
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
    percents = [quantity.unit == "%" for quantity in (truth, answer)]
    trees = [truth.tree, answer.tree]
    if percents[0] != percents[1]:
        hundredth = ("divide", trees[percents[1]], ("number", Fraction(100), 0))
        if (answer if percents[0] else truth).unit:
            return False
        return same_formula(hundredth, trees[percents[0]]) or (
            not _is_small(trees[percents[1]]) and same_formula(*trees)
        )
    if truth.unit and answer.unit:
        (factor, kind), (other_factor, other_kind) = (measure(quantity.unit) for quantity in (truth, answer))
        if kind != other_kind:
            return False
        if factor != other_factor:
            trees[0] = ("multiply", trees[0], ("number", factor / other_factor, 0))
    elif (truth.unit + answer.unit).endswith(COMPOUND):
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


def same_ratio(truth: Any, answer: Any) -> bool:
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


def with_unit(text: str, other: str) -> str:
    """Return a number with a letter behind it as one with a unit, if the other text has the same letter upright."""
    letters = re.fullmatch(r"(.*\d)\s*([A-Za-z]{1,3})", text.strip())
    if (
        letters
        and letters[2] in UNIT_SYMBOLS
        and re.search(rf"\\(?:text|mathrm)\s*\{{[\s~]*{letters[2]}\s*\}}\s*$", other)
    ):
        return rf"{letters[1]}\text{{ {letters[2]}}}"
    return text


def chemical_formula(text: str) -> str:
    """Return an upright chemical formula with subscripts, such as CO_2, without braces; empty for any other text."""
    plain = re.sub(r"\\(?:mathrm|text|ce)(?![a-z])|[{}\s$]", "", text)
    is_upright = plain != re.sub(r"[{}\s$]", "", text)
    has_subscripts = re.fullmatch(r"(?:[A-Z][a-z]?(?:_\d+)?)*[A-Z][a-z]?_\d(?:[A-Z][a-z]?|_?\d)*", plain)
    return plain if is_upright and has_subscripts else ""
