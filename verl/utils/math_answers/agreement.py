"""Decides whether two formulas agree, and two equations, by their values at points; see `values.py`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from mpmath import mp, mpf

from verl.utils.math_answers.values import (
    Point,
    TooLarge,
    Undefined,
    Value,
    divide,
    evaluate,
    is_matrix,
    is_zero,
    number,
    subtract,
)

COMPUTED = mpf(10) ** -15  # the tolerance for integrals, derivatives, limits and infinite sums
MANY_DIGITS = 10  # A decimal with at least this number of digits may be a rounded irrational number.
MOST_DIGITS = 20_000  # largest number of digits with which equality is confirmed
MOST_NEGATIVE = 4  # largest number of symbols that are each tried as the only negative one


def parts(*trees: tuple) -> Iterator[tuple]:
    """Yield the trees and all their subtrees."""
    for tree in trees:
        yield tree
        yield from parts(*(operand for operand in tree[1:] if isinstance(operand, tuple)))


def symbols(*trees: tuple) -> set[str]:
    """Return the names of symbols and unknown functions in formulas, without variables of sums and integrals."""
    names = {part[1] for part in parts(*trees) if part[0] in ("symbol", "unknown")}
    return names - {part[1] for part in parts(*trees) if part[0] in ("sum", "product", "integral", "limit")}


def renamed(tree: Any, old: tuple, new: tuple) -> Any:
    """Return a formula in which the subtree `new` replaces `old`."""
    if not isinstance(tree, tuple):
        return tree
    return new if tree == old else tuple(renamed(part, old, new) for part in tree)


def points(*trees: tuple) -> Iterator[Point]:
    """Yield the points at which formulas are compared: a single one if the formulas have no symbols."""
    limits = [limit for part in parts(*trees) if part[0] in ("sum", "product") for limit in part[2:4]]
    names = sorted(symbols(*trees))
    signs = ["positive", "positive", *names[:MOST_NEGATIVE], "mixed", "negative"] if names else ["positive"]
    for place, sign in enumerate(signs):
        yield Point(place, sign, whole=frozenset(symbols(*limits)))


def meanings(*trees: tuple) -> Iterator[Point]:
    """Yield a point for each meaning that degrees and `log` can have in the formulas."""
    every = list(parts(*trees))
    has_log = any(part[:2] == ("function", "log") and len(part) == 3 for part in every)
    for degree in ("number", "radian") if any(part[0] == "degrees" for part in every) else ("number",):
        for base in ("unknown", "e", "10") if has_log else ("unknown",):
            yield Point(degree=degree, log_base=base)


def close(left: Value, right: Value, tolerance: Value | None = None) -> bool:
    """Return whether two values are equal: exactly if both are fractions, else up to the relative error `tolerance`, by
    default 10^-50 for the usual 100 digits."""
    if is_matrix(left) or is_matrix(right):
        if not (is_matrix(left) and is_matrix(right) and (left.rows, left.cols) == (right.rows, right.cols)):
            return False
        return all(close(a, b, tolerance) for a, b in zip(left, right, strict=True))
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = number(left), number(right)
    if mp.isinf(left) or mp.isinf(right):
        return left == right
    size = max(abs(left), abs(right)) * (tolerance or mpf(10) ** (-mp.dps // 2))
    return abs(left - right) <= size or (is_zero(left) and is_zero(right))


def same_formula(left: tuple, right: tuple) -> bool:
    """Return whether two formulas have the same values wherever they are real, and are real at the same points. An
    exact number and its rounded decimal are the same, too, if the decimal has enough digits (see `is_rounded`)."""
    if left == right or is_rounded(left, right) or is_rounded(right, left):
        return True
    try:
        return any(_agree(left, right, meaning) for meaning in meanings(left, right))
    except TooLarge:
        return False


def is_rounded(decimal: tuple, exact: tuple) -> bool:
    """Return whether a decimal is a rounded exact number with endless digits, up to one unit of its last digit. The
    decimal needs at least 10 digits if the exact number is irrational, and 15 if it is a fraction."""
    if decimal[0] != "number" or decimal[2] < MANY_DIGITS or symbols(exact):
        return False
    if any(part[0] == "number" and part[2] for part in parts(exact)):
        return False
    try:
        value = evaluate(exact, Point())
    except Undefined:
        return False
    if is_matrix(value) or mp.isinf(number(value)) or _is_nonreal(value):
        return False
    value = mp.re(number(value))
    fraction = Fraction(int(value * mpf(10) ** 80), 10**80).limit_denominator(10**9)
    if close(fraction, value) and (decimal[2] < 15 or 10**30 % fraction.denominator == 0):
        return False
    unit = mpf(10) ** (mp.floor(mp.log10(abs(number(decimal[1])))) + 1 - decimal[2])
    return abs(value - number(decimal[1])) <= unit


def _agree(left: tuple, right: tuple, meaning: Point) -> bool:
    is_computed = any(
        part[0] in ("integral", "derivative", "limit")
        or (part[0] in ("sum", "product") and ("constant", "infty") in part[2:4])
        for part in parts(left, right)
    )
    real: list[Point] = []
    nonreal: list[Point] = []
    nonreal_agree = True
    for point in points(left, right):
        point = replace(meaning, number=point.number, signs=point.signs, whole=point.whole)
        values = values_at(point, left, right)
        if values is None:
            continue
        agree = not any(value is None for value in values) and close(
            values[0], values[1], COMPUTED if is_computed else None
        )
        if all(_is_nonreal(value) for value in values):
            nonreal.append(point)
            nonreal_agree &= agree
        elif agree:
            real.append(point)
        elif not (point.signs in ("mixed", "negative") and _is_outside(left, right, point)):
            return False
    if not real and not (nonreal and nonreal_agree):
        return False
    return is_computed or _is_confirmed(left, right, [*real, *nonreal][0])


def _is_outside(left: tuple, right: tuple, point: Point) -> bool:
    """Return whether a part of real formulas in several symbols is not real at a point, so that they may differ there.
    Where both symbols are negative, ln(xy) and ln x + ln y differ: only the first one is real."""
    every = list(parts(left, right))
    if len(symbols(left, right)) < 2 or ("constant", "i") in every:
        return False
    if any(part[:2] == ("function", "abs") for part in every):
        return False
    return any(map(_is_nonreal, values_at(point, *(part for part in every if part[0] != "row")) or ()))


def _is_confirmed(left: tuple, right: tuple, point: Point) -> bool:
    """Return whether formulas that agree in 100 digits also agree in more digits: 1 and 1 + e^{-300} do not."""
    fractions = [value for value in values_at(point, left, right) or () if isinstance(value, Fraction)]
    if len(fractions) == 2:
        return True
    sizes = [4 * len(str(value.denominator)) for value in fractions]
    digits = max([300 if symbols(left, right) else 2000, *sizes])
    if digits > MOST_DIGITS:
        return False
    with mp.workdps(digits):
        values = values_at(point, left, right)
        return values is not None and not any(value is None for value in values) and close(*values)


def values_at(point: Point, *trees: tuple) -> list[Value | None] | None:
    """Return the values of formulas at a point, None for a formula without a value; None if no formula has a value."""
    values: list[Value | None] = []
    for tree in trees:
        try:
            values.append(evaluate(tree, point))
        except TooLarge:
            raise
        except Undefined:
            values.append(None)
    return values if any(value is not None for value in values) else None


def _is_nonreal(value: Value | None) -> bool:
    if value is None or isinstance(value, Fraction) or is_matrix(value):
        return False
    return abs(mp.im(value)) > mpf(10) ** -40 * (1 + abs(value))


def _line(tree: tuple, name: str, point: Point) -> tuple[Value, Value]:
    """Return the value at `name` = 3, and the slope, of a formula; raise Undefined unless it is linear in `name`."""
    value, *others = (evaluate(tree, replace(point, bound={name: Fraction(x)})) for x in (3, 4, 6, -5))
    slope, *slopes = (divide(subtract(y, value), Fraction(x)) for x, y in zip((1, 3, -8), others, strict=True))
    if is_zero(slope) or not all(close(slope, other) for other in slopes):
        raise Undefined("not linear")
    return value, slope


def same_progression(one: tuple, other: tuple, name: str) -> bool:
    """Return whether two formulas that are linear in a symbol have the same set of values at the whole numbers."""
    for point in points(one, other):
        try:
            (value, step), (other_value, other_step) = (_line(tree, name, point) for tree in (one, other))
            ratio, count = divide(other_step, step), number(divide(subtract(other_value, value), step))
        except Undefined:
            return False
        is_whole = abs(count) < 10**6 and is_zero(count - mp.nint(mp.re(count)))
        if not is_whole or not (close(ratio, Fraction(1)) or close(ratio, Fraction(-1))):
            return False
    return True


def same_curve(first: list[tuple], second: list[tuple]) -> bool:
    """Return whether two equations, each a list of its left and right formula, have the same solutions.

    This holds if the differences left - right are proportional, or if both equations are linear in some symbol (x y = 1
    is linear in x) and have the same solution for it.
    """
    one, other = (("add", left, ("negative", right)) for left, right in (first, second))
    if not symbols(one) or symbols(one) != symbols(other):
        return False
    names = sorted(symbols(one) & {part[1] for part in parts(one) if part[0] == "symbol"})
    return _are_proportional(one, other) or any(_same_solution(one, other, name) for name in names)


def _are_proportional(one: tuple, other: tuple) -> bool:
    try:
        quotients = [divide(*(evaluate(tree, point) for tree in (one, other))) for point in points(one, other)]
    except Undefined:
        return False
    return not is_zero(quotients[0]) and all(close(a, b) for a, b in pairwise(quotients))


def _same_solution(one: tuple, other: tuple, name: str) -> bool:
    try:
        lines = [(_line(one, name, point), _line(other, name, point)) for point in points(one, other)]
    except Undefined:
        return False
    return all(close(divide(*line), divide(*other_line)) for line, other_line in lines)


def roots(formula: Callable[[Fraction], Value]) -> list[Value] | None:
    """Return the places where a formula's sign may change: zero, and its real roots. The result is None unless the
    formula is at most quadratic above zero and below zero, as one with |x| is."""
    result: list[Value] = [mpf(0)]
    for sign in (1, -1):
        values = [number(formula(Fraction(sign * x))) for x in (1, 2, 3, 5, 7)]
        a = (values[2] - 2 * values[1] + values[0]) / 2
        b = values[1] - values[0] - 3 * a
        c = values[0] - a - b
        if not all(close(a * x * x + b * x + c, value) for x, value in zip((5, 7), values[3:], strict=True)):
            return None
        result += [sign * root for root in _quadratic_roots(a, b, c) if root > 0]
    return result


def _quadratic_roots(a: Value, b: Value, c: Value) -> list[Value]:
    if is_zero(a):
        return [] if is_zero(b) else [-c / b]
    under = b * b - 4 * a * c
    root = mp.sqrt(0 if is_zero(under) else under)
    return [] if mp.im(root) else [(-b + root) / (2 * a), (-b - root) / (2 * a)]
