"""Decides whether two formulas agree, and two equations, by their values at points; see `answer_values`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from mpmath import mp, mpf

from verl.utils.reward_score.answer_kinds import INTEGER
from verl.utils.reward_score.answer_values import (
    Point,
    TooLarge,
    Undefined,
    Value,
    add,
    divide,
    evaluate,
    is_matrix,
    is_zero,
    multiply,
    number,
)

COMPUTED = mpf(10) ** -15  # the tolerance for integrals and derivatives
MANY_DIGITS = 10  # A decimal with so many digits may be a rounded irrational number.
MOST_DIGITS = 20_000  # Equality is not confirmed with more of them.
MOST_NEGATIVE = 4  # symbols of a formula that are each tried as the only negative one


def parts(tree: tuple) -> Iterator[tuple]:
    """Return the tree and all trees in it."""
    yield tree
    for operand in tree[1:]:
        if isinstance(operand, tuple):
            yield from parts(operand) if operand and isinstance(operand[0], str) else _parts_of_rows(operand)


def _parts_of_rows(rows: tuple) -> Iterator[tuple]:
    for row in rows:
        for cell in row:
            yield from parts(cell)


def symbols(tree: tuple) -> set[str]:
    """Return the names of symbols and unknown functions in a formula, but for those that sums and integrals bind."""
    names, bound = set(), set()
    for part in parts(tree):
        if part[0] in ("symbol", "unknown"):
            names.add(part[1])
        elif part[0] in ("sum", "product", "integral"):
            bound.add(part[1])
    return names - bound


def renamed(tree: Any, old: tuple, new: tuple) -> Any:
    """Return a formula with another symbol in place of one."""
    if not isinstance(tree, tuple):
        return tree
    return new if tree == old else tuple(renamed(part, old, new) for part in tree)


def points(*trees: tuple) -> Iterator[Point]:
    """Return the points at which formulas are compared: one if nothing varies."""
    every = [part for tree in trees for part in parts(tree)]
    whole = {name for part in every if part[0] in ("sum", "product") for limit in part[2:4] for name in symbols(limit)}
    names = sorted(set().union(*(symbols(tree) for tree in trees)))
    signs = ["positive", "positive", *names[:MOST_NEGATIVE], "mixed", "negative"]
    for place, sign in enumerate(signs if names else signs[:1]):
        yield Point(place, sign, whole=frozenset(whole))


def meanings(point: Point, *trees: tuple) -> Iterator[Point]:
    """Return the point with each meaning that degrees and `log` can have in the formulas."""
    every = [part for tree in trees for part in parts(tree)]
    degrees = ("number", "radian") if any(part[0] == "degrees" for part in every) else ("number",)
    has_log = any(part[:2] == ("function", "log") and len(part) == 3 for part in every)
    for degree in degrees:
        for base in ("unknown", "e", "10") if has_log else ("unknown",):
            yield replace(point, degree=degree, log_base=base)


def close(left: Value, right: Value, tolerance: Value | None = None) -> bool:
    """Return whether two values are equal: exactly if both are fractions, else up to half of the digits."""
    if is_matrix(left) and is_matrix(right):
        same_shape = (left.rows, left.cols) == (right.rows, right.cols)
        return same_shape and all(close(a, b, tolerance) for a, b in zip(left, right, strict=True))
    if isinstance(left, Fraction) and isinstance(right, Fraction) and tolerance is None:
        return left == right
    if is_matrix(left) or is_matrix(right):
        return False
    left, right = number(left), number(right)
    if mp.isinf(left) or mp.isinf(right):
        return left == right
    tolerance = mpf(10) ** (-mp.dps // 2) if tolerance is None else tolerance
    return abs(left - right) <= tolerance * max(abs(left), abs(right)) or (is_zero(left) and is_zero(right))


def same_formula(left: tuple, right: tuple) -> bool:
    """Return whether two formulas have the same values wherever they are real, and are real at the same points.

    Raises:
        Unreadable: a formula says what is not computed.
    """
    if left == right:
        return True
    if is_rounded(left, right) or is_rounded(right, left):
        return True
    return any(_agree(left, right, meaning) for meaning in meanings(Point(0), left, right))


def is_rounded(decimal: tuple, exact: tuple) -> bool:
    """Return whether a decimal with many digits is a number without an end, up to one unit of its last digit.

    It needs 10 digits for an irrational number, and 15 for a fraction.
    """
    kind, *content = decimal[1] if decimal[0] == "negative" else decimal
    if kind != "number" or content[1] < MANY_DIGITS or symbols(exact):
        return False
    if any(part[0] == "number" and part[2] for part in parts(exact)):
        return False
    try:
        value = evaluate(exact, Point(0))
    except (Undefined, TooLarge):
        return False
    if is_matrix(value) or mp.isinf(number(value)) or _is_nonreal(value):
        return False
    value = mp.re(number(value))
    fraction = Fraction(int(value * mpf(10) ** 80), 10**80).limit_denominator(10**9)
    is_fraction = close(fraction, value)
    if is_fraction and (content[1] < 15 or 10**30 % fraction.denominator == 0):
        return False
    unit = mpf(10) ** (mp.floor(mp.log10(number(content[0]))) + 1 - content[1])
    return abs(value - number(evaluate(decimal, Point(0)))) <= unit


def _agree(left: tuple, right: tuple, meaning: Point) -> bool:
    is_computed = any(part[0] in ("integral", "derivative") for tree in (left, right) for part in parts(tree))
    tolerance = COMPUTED if is_computed else None
    real: list[Point] = []
    nonreal: list[Point] = []
    nonreal_agree = True
    for point in points(left, right):
        point = replace(meaning, number=point.number, signs=point.signs, whole=point.whole)
        values = values_at(point, left, right)
        if values is None:
            continue
        if all(value is None for value in values):
            return False
        agree = all(value is not None for value in values) and close(values[0], values[1], tolerance)
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
    """Return whether real formulas in several symbols differ only as a part of one is not real at a point.

    So do ln(xy) and ln x + ln y, of which only the first is real throughout where both symbols are negative.
    """
    every = [part for tree in (left, right) for part in parts(tree)]
    if len(symbols(left) | symbols(right)) < 2 or ("constant", "i") in every:
        return False
    if any(part[:2] == ("function", "abs") for part in every):
        return False
    return any(_is_nonreal(value) for part in every for value in values_at(point, part) or ())


def _is_confirmed(left: tuple, right: tuple, point: Point) -> bool:
    """Return whether formulas that agree to 100 digits do so with more of them: 1 and 1 + e^{-300} do not."""
    values = values_at(point, left, right)
    if values is None or all(isinstance(value, Fraction) for value in values):
        return True
    sizes = [len(str(value.denominator)) for value in values if isinstance(value, Fraction)]
    digits = max(2000 if not symbols(left) | symbols(right) else 300, 4 * max(sizes, default=0))
    if digits > MOST_DIGITS:
        return False
    with mp.workdps(digits):
        values = values_at(point, left, right)
        return values is not None and all(value is not None for value in values) and close(*values)


def values_at(point: Point, *trees: tuple) -> tuple | None:
    """Return the values of formulas at a point, None for one without; None in place of all if all have none there.

    A value that is too large to be computed makes a tuple of None for all: nothing agrees with it.
    """
    values: list[Value | None] = []
    for tree in trees:
        try:
            values.append(evaluate(tree, point))
        except Undefined:
            values.append(None)
        except TooLarge:
            return (None,) * len(trees)
    return tuple(values) if any(value is not None for value in values) else None


def _is_nonreal(value: Value | None) -> bool:
    if value is None or isinstance(value, Fraction) or is_matrix(value):
        return False
    return abs(mp.im(value)) > mpf(10) ** -40 * (1 + abs(value))


def same_progression(one: tuple, other: tuple) -> bool:
    """Return whether two formulas that are linear in INTEGER have the same values for all whole numbers."""
    for point in points(one, other):
        values = []
        try:
            for tree in (one, other):
                at = [evaluate(tree, replace(point, bound={INTEGER: Fraction(index)})) for index in range(3)]
                steps = [add(after, multiply(Fraction(-1), before)) for before, after in pairwise(at)]
                if is_zero(steps[0]) or not close(*steps):
                    return False
                values.append((at[0], steps[0]))
            (start, step), (other_start, other_step) = values
            count = divide(add(other_start, multiply(Fraction(-1), start)), step)
            ratio = divide(other_step, step)
        except (Undefined, TooLarge):
            return False
        if not (close(ratio, Fraction(1)) or close(ratio, Fraction(-1))) or not _is_whole(count):
            return False
    return True


def _is_whole(value: Value) -> bool:
    value = number(value)
    return abs(value) < 10**6 and is_zero(value - mp.nint(mp.re(value)))


def is_true(sides: list[tuple]) -> bool:
    """Return whether all sides of an equation without symbols have the same value."""
    return all(same_formula(left, right) for left, right in pairwise(sides))


def same_curve(first: tuple[tuple, tuple], second: tuple[tuple, tuple]) -> bool:
    """Return whether two equations have the same solutions.

    They have if the differences of their sides are proportional, or if both are linear in a symbol (x y = 1 is) and
    have the same solution for it.
    """
    one, other = (("add", left, ("negative", right)) for left, right in (first, second))
    names = symbols(one) | symbols(other)
    if not names or symbols(one) != symbols(other):
        return False
    if proportionality(one, other):
        return True
    common = {part[1] for part in parts(one) if part[0] == "symbol"} & names
    return any(_same_solution(one, other, name) for name in sorted(common))


def proportionality(one: tuple, other: tuple) -> Value | None:
    """Return the constant quotient of two formulas; None if it is not constant, or zero, or has no value."""
    quotients: list[Value] = []
    for point in points(one, other):
        values = values_at(point, one, other)
        if values is None:
            continue
        if any(value is None or is_matrix(value) or is_zero(value) for value in values):
            return None
        quotients.append(divide(values[0], values[1]))
    if len(quotients) < 3 or not all(close(a, b) for a, b in pairwise(quotients)):
        return None
    return quotients[0]


def _same_solution(one: tuple, other: tuple, name: str) -> bool:
    count = 0
    for point in points(one, other):
        try:
            solutions = [_linear_solution(tree, name, point) for tree in (one, other)]
        except (Undefined, TooLarge):
            continue
        if None in solutions or not close(solutions[0], solutions[1]):
            return False
        count += 1
    return count >= 3


def _linear_solution(tree: tuple, name: str, point: Point) -> Value | None:
    """Return the root of a formula that is linear in a symbol; None if it is not linear, or has none."""
    at = [evaluate(tree, Point(point.number, point.signs, bound={name: Fraction(x)})) for x in (3, 4, 6, -5)]
    are_fractions = all(isinstance(value, Fraction) for value in at)
    first, second, third, negative = at if are_fractions else map(number, at)
    slope = second - first
    if is_zero(slope) or not close(third - second, 2 * slope) or not close(first - negative, 8 * slope):
        return None
    return 3 - first / slope


def roots(formula: Callable[[Fraction], Value]) -> list[Value] | None:
    """Return zero and the real roots of a formula that is quadratic on each side of zero; None for any other."""
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
    if under < 0 and not is_zero(under):
        return []
    root = mp.sqrt(0 if is_zero(under) else under)
    return [(-b + root) / (2 * a), (-b - root) / (2 * a)]
