"""Confirms a verdict "equal" of math-verify, for notations that the project's own reader of answers does not know.

The library's expressions are computed with many digits at random points, component by component. Words, of which the
library may compare only the first, are never confirmed, nor is anything else that has no value.
"""

import random
import re
from typing import Any

from sympy import Expr, FiniteSet, Float, MatrixBase, N, Rational, Tuple

DIGITS = 50
_TOLERANCE = Float("1e-40", DIGITS)
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|mathbf|operatorname|textbf)[a-z]*\s*\{|[A-Za-z]{4,}\s+[A-Za-z]{2,}")


def confirms(gold: list[Any], parsed: list[Any], truth: str, answer: str) -> bool:
    """Return whether some expression of the truth has the values of some expression of the answer.

    Args:
        gold: the library's expressions for the truth.
        parsed: its expressions for the answer.
        truth: the text of `gold`.
        answer: the text of `parsed`.
    """
    if _WORDS.search(truth) or _WORDS.search(answer):
        return False
    return any(_agree(one, other) for one in gold for other in parsed if not isinstance(one, str))


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, Tuple | FiniteSet) and isinstance(other, Tuple | FiniteSet):
        return len(one.args) == len(other.args) and all(map(_agree, one.args, other.args))
    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase):
        return one.shape == other.shape and all(map(_agree, one, other))
    if not isinstance(one, Expr) or not isinstance(other, Expr) or one.free_symbols != other.free_symbols:
        return False
    return all(_agree_at(one, other, seed) for seed in range(3 if one.free_symbols else 1))


def _agree_at(one: Expr, other: Expr, seed: int) -> bool:
    rng = random.Random(seed)
    names = sorted(one.free_symbols, key=str)
    values = {name: Rational(rng.randrange(5, 61, 2), 16) for name in names}
    first, second = (N(expression.subs(values).doit(), DIGITS) for expression in (one, other))
    if not (first.is_number and second.is_number):
        return False
    return bool(abs(first - second) <= _TOLERANCE * (abs(first) + abs(second)))
