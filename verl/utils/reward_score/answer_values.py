"""Computes formulas at points: exact fractions as long as everything is rational, else 100 digits of mpmath.

Every symbol has the same value wherever its name stands, a fixed random fraction for each point; so has every unknown
function for equal arguments. Formulas that agree at several such points are equal.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

from mpmath import mp, mpc, mpf

from verl.utils.reward_score.answer_tokens import Unreadable

DIGITS = 100
MAX_BITS = 400_000
MAX_FACTORIAL = 3000
MAX_TERMS = 1000


class Undefined(ValueError):
    """The formula has no value at the point, such as 1/0."""


class TooLarge(ValueError):
    """The value has more digits than are computed."""


Value = Any  # a Fraction, or a real or complex number or a matrix of mpmath


@dataclass(frozen=True)
class Point:
    """The values of all symbols, and what a degree and `log` without a base mean."""

    number: int
    signs: str = "positive"  # or mixed, or negative, or the name of the only symbol that is negative
    degree: str = "number"
    log_base: str = "unknown"
    whole: frozenset[str] = frozenset()  # the names of symbols whose values are whole numbers
    bound: dict = field(default_factory=dict)
    terms: int = 1  # how many terms of sums the formula is computed for

    def symbol(self, name: str) -> Value:
        return self.bound[name] if name in self.bound else _random_value(name, self)


def _random_value(name: str, point: Point) -> Fraction:
    rng = random.Random(f"{name}/{point.number}")
    if name in point.whole:
        return Fraction(rng.randint(2, 9))
    size = Fraction(rng.randrange(5, 61, 2), 16)
    is_negative = point.signs in ("negative", name) or (point.signs == "mixed" and rng.random() < 0.5)
    return -size if is_negative else size


def evaluate(tree: tuple, point: Point) -> Value:
    """Return the value of a formula.

    Raises:
        Undefined: there is none.
        TooLarge: a value with too many digits or terms to compute.
        Unreadable: an operation without a rule here.
    """
    kind = tree[0]
    match kind:
        case "number":
            return tree[1]
        case "symbol":
            return point.symbol(tree[1])
        case "constant":
            return _constant(tree[1], point)
        case "add" | "multiply" | "divide" | "power":
            return _OPERATIONS[kind](evaluate(tree[1], point), evaluate(tree[2], point))
        case "mixed":
            return add(evaluate(tree[1], point), evaluate(tree[2], point))
        case "negative":
            return multiply(Fraction(-1), evaluate(tree[1], point))
        case "degrees":
            value = evaluate(tree[1], point)
            return value if point.degree == "number" else multiply(value, divide(+mp.pi, Fraction(180)))
        case "factorial":
            return _factorial(evaluate(tree[1], point))
        case "function":
            inner = replace(point, degree="radian") if tree[1] in _TAKES_AN_ANGLE else point
            return _function(tree[1], [evaluate(operand, inner) for operand in tree[2:]], point)
        case "unknown":
            return _unknown(tree[1], [evaluate(operand, point) for operand in tree[2:]], point)
        case "sum" | "product":
            return _series(tree, point)
        case "matrix":
            return mp.matrix([[number(evaluate(cell, point)) for cell in row] for row in tree[1]])
    return _calculus(tree, point)


def _constant(name: str, point: Point) -> Value:
    if name in point.bound:
        return point.bound[name]
    return {"pi": +mp.pi, "e": +mp.e, "i": mpc(0, 1), "infty": mp.inf}[name]


def is_matrix(value: Value) -> bool:
    return isinstance(value, mp.matrix)


def number(value: Value) -> Value:
    """Return the value as a number of mpmath."""
    if is_matrix(value):
        raise Unreadable("a matrix where a number is expected")
    return mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def checked(value: Value) -> Value:
    if mp.isnan(value):
        raise Undefined("not a number")
    return value


def _arithmetic(operation: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    """Return the operation for fractions, for numbers of mpmath, and for matrices that fit."""

    def result(left: Value, right: Value) -> Value:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return operation(left, right)
        left, right = (value if is_matrix(value) else number(value) for value in (left, right))
        if not is_matrix(left) and not is_matrix(right):
            return checked(operation(left, right))
        try:
            return operation(left, right)
        except (ValueError, TypeError, AttributeError) as error:
            raise Undefined("matrices that do not fit") from error

    return result


add = _arithmetic(lambda left, right: left + right)
multiply = _arithmetic(lambda left, right: left * right)


def divide(left: Value, right: Value) -> Value:
    if is_zero(right):
        raise Undefined("division by zero")
    return left / right if isinstance(left, Fraction) and isinstance(right, Fraction) else multiply(left, 1 / right)


def is_zero(value: Value) -> bool:
    """Return whether a number is zero, but for what rounding leaves of it."""
    return value == 0 if isinstance(value, Fraction) else abs(number(value)) < mpf(10) ** (10 - mp.dps)


def power(base: Value, exponent: Value) -> Value:
    if is_matrix(base) and exponent in (2, 3, 4) and base.rows == base.cols:
        return base ** int(exponent)
    if is_zero(base):
        if mp.re(number(exponent)) < 0:
            raise Undefined("division by zero")
        return Fraction(1) if is_zero(exponent) else Fraction(0)
    size = abs(number(exponent))
    if not isinstance(base, Fraction) or base not in (1, -1):
        size *= abs(mp.log(abs(number(base)), 2))
    if not size < MAX_BITS and not mp.isinf(size):
        raise TooLarge("power")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2:  # the real root
            root = mp.power(-number(base), number(exponent))
            return -root if exponent.numerator % 2 else root
    return checked(mp.power(number(base), number(exponent)))


_OPERATIONS: dict[str, Callable[[Value, Value], Value]] = {
    "add": add,
    "multiply": multiply,
    "divide": divide,
    "power": power,
}


def _factorial(value: Value) -> Value:
    if abs(number(value)) > MAX_FACTORIAL:
        raise TooLarge("factorial")
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        return Fraction(math.factorial(value.numerator))
    return _by_mpmath(mp.factorial, number(value))


def _by_mpmath(function: Callable, *operands: Value) -> Value:
    try:
        return checked(mp.mpmathify(function(*operands)))
    except (ValueError, ZeroDivisionError, OverflowError, TypeError) as error:
        raise Undefined(str(error)) from error


def _binomial(above: Value, below: Value) -> Value:
    if max(abs(number(above)), abs(number(below))) > MAX_FACTORIAL:
        raise TooLarge("binomial")
    if all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in (above, below)):
        return Fraction(math.comb(int(above), int(below)))
    return _by_mpmath(mp.binomial, number(above), number(below))


def _root(value: Value, degree: Value) -> Value:
    if isinstance(value, Fraction) and isinstance(degree, Fraction) and degree == 2 and value >= 0:
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    return power(value, divide(Fraction(1), degree))


def _log(value: Value, base: Value) -> Value:
    if is_zero(value):
        raise Undefined("logarithm of zero")
    return divide(_by_mpmath(mp.log, number(value)), _by_mpmath(mp.log, base))


def _whole(function: Callable[[Fraction], int]) -> Callable[[Value], Value]:
    def rounded(value: Value) -> Value:
        if not isinstance(value, Fraction):
            if not mp.isfinite(value) or mp.im(value) != 0 or abs(value) > mpf(10) ** 50:
                raise Undefined("no whole part")
            value = Fraction(int(mp.floor(mp.re(value) * mpf(10) ** 60)), 10**60)
        return Fraction(function(value))

    return rounded


def _exact(function: Callable[..., int | Fraction]) -> Callable[..., Value]:
    def exact_function(*operands: Value) -> Value:
        is_whole = function in (math.gcd, math.lcm)
        if not all(isinstance(value, Fraction) and (value.denominator == 1 or not is_whole) for value in operands):
            raise Unreadable("only fractions")
        return Fraction(function(*map(int, operands)) if is_whole else function(*operands))

    return exact_function


def _absolute(value: Value) -> Value:
    return abs(value) if isinstance(value, Fraction) else abs(number(value))


_FUNCTIONS: dict[str, Callable] = {
    "abs": _absolute,
    "binomial": _binomial,
    "root": _root,
    "floor": _whole(math.floor),
    "ceil": _whole(math.ceil),
    "min": _exact(min),
    "max": _exact(max),
    "gcd": _exact(math.gcd),
    "lcm": _exact(math.lcm),
    "transpose": lambda matrix: matrix.T,
    "det": mp.det,
}
_BY_MPMATH = {
    "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc, "arcsin": mp.asin,
    "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh,
    "arcsinh": mp.asinh, "arccosh": mp.acosh, "arctanh": mp.atanh, "Re": mp.re, "Im": mp.im, "arg": mp.arg,
    "cis": mp.expj,
}  # fmt: skip
_TAKES_AN_ANGLE = frozenset("sin cos tan cot sec csc cis".split())


def _function(name: str, operands: list[Value], point: Point) -> Value:
    if name in ("ln", "log10", "log") and len(operands) in (1, 2):
        bases = {"unknown": mpf("4.625"), "e": +mp.e, "10": mpf(10)}
        base = {"ln": mp.e + 0, "log10": mpf(10), "log": bases[point.log_base]}[name]
        return _log(operands[0], number(operands[1]) if len(operands) == 2 else base)
    if name == "exp" and len(operands) == 1:
        return power(+mp.e, operands[0])
    if name in _FUNCTIONS:
        try:
            return _FUNCTIONS[name](*operands)
        except (TypeError, AttributeError, ValueError) as error:
            raise error if isinstance(error, Undefined | TooLarge) else Unreadable(f"operands of {name}") from error
    if name not in _BY_MPMATH or len(operands) != 1:
        raise Unreadable(f"function {name}")
    operand = number(operands[0])
    if not mp.isinf(operand) and abs(operand) > 10**6:
        raise TooLarge(name)
    return _by_mpmath(_BY_MPMATH[name], operand)


@cache
def _coefficients(name: str, count: int, point_number: int) -> list[float]:
    rng = random.Random(f"{name}/{count}/{point_number}")
    return [rng.uniform(0.5, 2) for _ in range(3 * count)]


def _unknown(name: str, operands: list[Value], point: Point) -> Value:
    """Return the value of a function without a rule: the same for equal operands, else another."""
    coefficients = _coefficients(name, len(operands), point.number)
    total = mpf(0)
    for operand, steepness, phase, slope in zip(operands, *(coefficients[start::3] for start in range(3)), strict=True):
        total += mp.sin(steepness * number(operand) + phase) + slope * number(operand)
    return checked(total)


def _series(tree: tuple, point: Point) -> Value:
    kind, variable, start, end, body = tree
    first, last = evaluate(start, point), evaluate(end, point)
    if not all(isinstance(limit, Fraction) and limit.denominator == 1 for limit in (first, last)):
        raise Unreadable("a sum or product without whole limits")
    terms = max(1, int(last - first) + 1) * point.terms
    if terms > MAX_TERMS:
        raise TooLarge("terms")
    total: Value = Fraction(kind == "product")
    for index in range(int(first), int(last) + 1):
        term = evaluate(body, replace(point, terms=terms, bound={**point.bound, variable: Fraction(index)}))
        total = multiply(total, term) if kind == "product" else add(total, term)
    return total


def _calculus(tree: tuple, point: Point) -> Value:
    """Return the value of an integral between limits or a derivative, to about 20 digits."""

    def body(value: Value) -> Value:
        return number(evaluate(tree[-1], replace(point, bound={**point.bound, tree[1]: value})))

    with mp.workdps(30):
        if tree[0] == "derivative":
            return _by_mpmath(mp.diff, body, number(point.symbol(tree[1])))
        limits = [number(evaluate(limit, point)) for limit in tree[2:4]]
        return _by_mpmath(mp.quad, body, limits)
