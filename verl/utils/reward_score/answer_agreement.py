"""Decides whether two formulas agree, and two equations, by their values at points; see `answer_values`."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise

from mpmath import mp, mpf

from .answer_values import Matrix, Point, TooLarge, Undefined, Value, divide, evaluate, is_zero, number

TOLERANCE = mpf(10) ** -50
ROUNDING = mpf(10) ** -9  # for decimals of at least MANY_DIGITS
COMPUTED = mpf(10) ** -15  # for integrals and derivatives
MANY_DIGITS = 10
_SIGNS = ("positive", "positive", "mixed", "mixed", "negative")


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


def points(*trees: tuple) -> Iterator[Point]:
    """Return the points at which formulas are compared: one if nothing varies."""
    every = [part for tree in trees for part in parts(tree)]
    whole = {name for part in every if part[0] in ("sum", "product") for limit in part[2:4] for name in symbols(limit)}
    varies = any(symbols(tree) for tree in trees)
    for place, signs in enumerate(_SIGNS if varies else _SIGNS[:1]):
        yield Point(place, signs, whole=frozenset(whole))


def meanings(point: Point, *trees: tuple) -> Iterator[Point]:
    """Return the point with each meaning that degrees and `log` can have in the formulas."""
    every = [part for tree in trees for part in parts(tree)]
    degrees = ("number", "radian") if any(part[0] == "degrees" for part in every) else ("number",)
    has_log = any(part[:2] == ("function", "log") and len(part) == 3 for part in every)
    for degree in degrees:
        for base in ("unknown", "e", "10") if has_log else ("unknown",):
            yield Point(point.number, point.signs, degree, base, point.whole, point.bound)


def close(left: Value, right: Value, tolerance: Value = TOLERANCE) -> bool:
    """Return whether two values are equal: exactly if both are fractions, else up to rounding."""
    if isinstance(left, Matrix) or isinstance(right, Matrix):
        rows = [[*value.rows] if isinstance(value, Matrix) else [] for value in (left, right)]
        if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
            return False
        return all(
            close(cells[0], cells[1], tolerance)
            for pair in zip(*rows, strict=True)
            for cells in zip(*pair, strict=True)
        )
    if isinstance(left, Fraction) and isinstance(right, Fraction) and tolerance == TOLERANCE:
        return left == right
    left, right = number(left), number(right)
    if mp.isinf(left) or mp.isinf(right):
        return left == right
    return abs(left - right) <= tolerance * max(abs(left), abs(right)) or (is_zero(left) and is_zero(right))


def tolerance_for(left: tuple, right: tuple) -> Value:
    """Return the tolerance for two formulas: wider if one has a decimal that must be rounded, or an integral."""
    digits = [max((part[2] for part in parts(tree) if part[0] == "number"), default=0) for tree in (left, right)]
    is_rounded = max(digits) >= MANY_DIGITS and min(digits) == 0
    is_computed = any(part[0] in ("integral", "derivative") for tree in (left, right) for part in parts(tree))
    return ROUNDING if is_rounded else COMPUTED if is_computed else TOLERANCE


def same_formula(left: tuple, right: tuple) -> bool:
    """Return whether two formulas have the same values wherever they are real, and are real at the same points.

    Raises:
        Unreadable: a formula says what is not computed.
    """
    if left == right:
        return True
    return any(_agree(left, right, meaning) for meaning in meanings(Point(0), left, right))


def _agree(left: tuple, right: tuple, meaning: Point) -> bool:
    tolerance = tolerance_for(left, right)
    complex_agree: list[bool] = []
    real_count = 0
    for point in points(left, right):
        point = Point(point.number, point.signs, meaning.degree, meaning.log_base, point.whole)
        values = values_at(point, left, right)
        if values is None:
            continue
        if values == (None, None):
            return False
        agree = None not in values and close(values[0], values[1], tolerance)
        if all(_is_nonreal(value) for value in values):
            complex_agree.append(agree)
        elif not agree:
            return False
        else:
            real_count += 1
    return real_count > 0 or (bool(complex_agree) and all(complex_agree))


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
    if value is None or isinstance(value, Fraction | Matrix):
        return False
    return abs(mp.im(value)) > mpf(10) ** -40 * (1 + abs(value))


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
        if None in values or is_zero(values[0]) or is_zero(values[1]):
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
    at = [evaluate(tree, Point(point.number, point.signs, bound={name: Fraction(x)})) for x in (3, 4, 6)]
    first, second, third = (value if isinstance(value, Fraction) else number(value) for value in at)
    slope = second - first
    if is_zero(slope) or not close(third - second, 2 * slope):
        return None
    return 3 - first / slope


def roots(formula: Callable[[Fraction], Value]) -> list[Value] | None:
    """Return the real roots of a formula in x that is quadratic in x, or linear in |x|; None for any other."""
    right, left = ([number(formula(Fraction(sign * x))) for x in (1, 2, 3, 5, 7)] for sign in (1, -1))
    for values, is_even in ((right, False), (right, True)):
        c2 = (values[2] - 2 * values[1] + values[0]) / 2
        c1 = values[1] - values[0] - 3 * c2
        c0 = values[0] - c1 - c2

        def fit(x: int, a: Value = c2, b: Value = c1, c: Value = c0) -> Value:
            return a * x * x + b * x + c

        fits = all(abs(fit(x) - value) < mpf(10) ** -40 for x, value in zip((5, 7), values[3:], strict=True))
        mirrored = [fit(x if is_even else -x) for x in (1, 2, 3, 5, 7)]
        if not fits or any(abs(a - b) > mpf(10) ** -40 for a, b in zip(mirrored, left, strict=True)):
            continue
        solutions = _quadratic_roots(c2, c1, c0)
        return (
            [sign * root for root in solutions for sign in (1, -1) if root >= 0 or not is_even]
            if is_even
            else solutions
        )
    return None


def _quadratic_roots(a: Value, b: Value, c: Value) -> list[Value]:
    if is_zero(a):
        return [] if is_zero(b) else [-c / b]
    under = b * b - 4 * a * c
    if under < 0 and not is_zero(under):
        return []
    root = mp.sqrt(0 if is_zero(under) else under)
    return [(-b + root) / (2 * a), (-b - root) / (2 * a)]
