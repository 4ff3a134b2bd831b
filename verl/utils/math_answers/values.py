"""Computes formulas at points: exact fractions as long as everything is rational, else 100 digits of mpmath.

At a point every symbol has a fixed random fraction as its value, the same wherever the symbol stands, and every unknown
function has one for equal arguments. Formulas that agree at several such points are equal.
"""

import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

from mpmath import mp, mpc, mpf

from verl.utils.math_answers.tokens import Unreadable

DIGITS = 100
MAX_BITS = 400_000
MAX_FACTORIAL = 3000
MAX_TERMS = 1000
Value = Any  # a Fraction, or a real or complex number or a matrix of mpmath


class Undefined(ValueError):
    """The formula has no value at the point, such as 1/0."""


class TooLarge(Undefined):
    """The value has too many digits or terms to be computed."""


@dataclass(frozen=True)
class Point:
    """The values of all symbols, and the meanings of a degree and of `log` without a base."""

    number: int = 0  # the seed of the values: points with another number have other values
    signs: str = "positive"  # positive, mixed, negative, or the name of the only negative symbol
    degree: str = "number"
    log_base: str = "unknown"
    whole: frozenset[str] = frozenset()  # the names of symbols whose values are whole numbers
    bound: dict = field(default_factory=dict)  # symbol -> value that it has instead of a random one
    terms: int = 1  # the number of terms for which the formula is computed

    def symbol(self, name: str) -> Value:
        if name in self.bound:
            return self.bound[name]
        rng = random.Random(f"{name}/{self.number}")
        if name in self.whole:
            return Fraction(rng.randint(2, 9))
        size = Fraction(rng.randrange(5, 61, 2), 16)
        is_negative = self.signs in ("negative", name) or (self.signs == "mixed" and rng.random() < 0.5)
        return -size if is_negative else size


def evaluate(tree: tuple, point: Point) -> Value:
    """Return the value of a formula. Raise Undefined without a value, TooLarge (an Undefined) if it has too many digits
    or terms to compute, and Unreadable for an operation without a rule in this module."""
    kind, first, *rest = tree
    if kind == "number":
        return first
    if kind == "symbol" or (kind == "constant" and first in point.bound):
        return point.symbol(first)
    if kind == "constant":
        return {"pi": +mp.pi, "e": +mp.e, "i": mpc(0, 1), "infty": mp.inf}[first]
    if kind == "function":
        inner = replace(point, degree="radian") if first in _OF_AN_ANGLE else point
        operands = [evaluate(operand, inner) for operand in rest]
        if first == "log" and len(operands) == 1:
            operands.append({"unknown": mpf("4.625"), "e": +mp.e, "10": mpf(10)}[point.log_base])
        return _computed(_FUNCTIONS[first], *operands)
    if kind == "unknown":
        return _unknown(first, [evaluate(operand, point) for operand in rest], point)
    if kind in ("sum", "product"):
        return _series(tree, point)
    if kind in ("integral", "derivative", "limit"):
        return _calculus(tree, point)
    if kind == "matrix":
        return mp.matrix([[number(evaluate(cell, point)) for cell in row[1:]] for row in tree[1:]])
    operands = [evaluate(operand, point) for operand in tree[1:]]
    if kind == "degrees":
        return operands[0] if point.degree == "number" else multiply(operands[0], mp.pi / 180)
    return _OPERATIONS[kind](*operands)


def is_matrix(value: Value) -> bool:
    return isinstance(value, mp.matrix)


def number(value: Value) -> Value:
    """Return the value as a number of mpmath."""
    if is_matrix(value):
        raise Unreadable("a matrix where a number is expected")
    return mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def is_zero(value: Value) -> bool:
    """Return whether a number is zero up to rounding errors."""
    return value == 0 if isinstance(value, Fraction) else abs(number(value)) < mpf(10) ** (10 - mp.dps)


def _computed(function: Callable, *operands: Value) -> Value:
    """Return a function's value for numbers and matrices of mpmath; raise Undefined if it has none."""
    try:
        value = function(*operands)
    except Undefined:
        raise
    except (ValueError, ZeroDivisionError, OverflowError, TypeError, AttributeError) as error:
        raise Undefined(str(error)) from error
    if not isinstance(value, Fraction | mp.matrix) and mp.isnan(value):
        raise Undefined("not a number")
    return value


def _arithmetic(operation: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:

    def result(left: Value, right: Value) -> Value:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return operation(left, right)
        return _computed(operation, *(value if is_matrix(value) else number(value) for value in (left, right)))

    return result


add, subtract, multiply = map(_arithmetic, (operator.add, operator.sub, operator.mul))


def divide(left: Value, right: Value) -> Value:
    """Return left / right; raise Undefined if `right` is zero."""
    if is_zero(right):
        raise Undefined("division by zero")
    return multiply(left, 1 / right)


def _power(base: Value, exponent: Value) -> Value:
    if is_matrix(base) and exponent in (2, 3, 4) and base.rows == base.cols:
        return base ** int(exponent)
    if is_zero(base):
        if mp.re(number(exponent)) < 0:
            raise Undefined("division by zero")
        return Fraction(is_zero(exponent))
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
    return _computed(mp.power, number(base), number(exponent))


def _exact_for_naturals(exact: Callable[..., int], general: Callable) -> Callable[..., Value]:
    """Return a function that is exact for natural numbers, and computed by mpmath for all others."""

    def result(*operands: Value) -> Value:
        if max(abs(number(value)) for value in operands) > MAX_FACTORIAL:
            raise TooLarge(exact.__name__)
        if all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in operands):
            return Fraction(exact(*map(int, operands)))
        return _computed(general, *map(number, operands))

    return result


def _logarithm(value: Value, base: Value) -> Value:
    return divide(_computed(mp.log, number(value)), _computed(mp.log, number(base)))


def _whole(function: Callable[[Fraction], int], value: Value) -> Fraction:
    if not isinstance(value, Fraction):
        if not mp.isfinite(value) or mp.im(value) != 0 or abs(value) > mpf(10) ** 50:
            raise Undefined("no whole part")
        value = Fraction(int(mp.floor(mp.re(value) * mpf(10) ** 60)), 10**60)
    return Fraction(function(value))


def _apply_to_number(function: Callable[[Value], Value], value: Value) -> Value:
    value = number(value)
    if not mp.isinf(value) and abs(value) > 10**6:
        raise TooLarge("operand")
    return function(value)


def _apply_to_integers(function: Callable[..., int], *operands: Fraction) -> Fraction:
    if any(value.denominator != 1 for value in operands):
        raise ValueError("only whole numbers")
    return Fraction(function(*map(int, operands)))


_NAMED_AS_IN_MPMATH = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh arcsinh arccosh arctanh arg".split()
)
_BY_MPMATH = {name: getattr(mp, name.replace("arc", "a")) for name in _NAMED_AS_IN_MPMATH}
_BY_MPMATH |= {"Re": mp.re, "Im": mp.im, "cis": mp.expj}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": add,
    "multiply": multiply,
    "divide": divide,
    "power": _power,
    "negative": lambda value: multiply(Fraction(-1), value),
    "ratio": lambda *terms: _computed(divide, *terms),
    "factorial": _exact_for_naturals(math.factorial, mp.factorial),
}
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "abs": abs,
    "binomial": _exact_for_naturals(math.comb, mp.binomial),
    "root": lambda value, degree: _power(value, divide(Fraction(1), degree)),
    "exp": lambda value: _power(+mp.e, value),
    "ln": lambda value: _logarithm(value, +mp.e),
    "log10": lambda value: _logarithm(value, Fraction(10)),
    "log": _logarithm,
    "floor": partial(_whole, math.floor),
    "ceil": partial(_whole, math.ceil),
    "min": lambda *operands: min(operands, key=number),
    "max": lambda *operands: max(operands, key=number),
    "gcd": partial(_apply_to_integers, math.gcd),
    "lcm": partial(_apply_to_integers, math.lcm),
    "transpose": lambda matrix: matrix.T,
    "det": mp.det,
    **{name: partial(_apply_to_number, function) for name, function in _BY_MPMATH.items()},
}
_OF_AN_ANGLE = frozenset("sin cos tan cot sec csc cis".split())


def _unknown(name: str, operands: list[Value], point: Point) -> Value:
    """Return the value of an unknown function: the same for equal operands, another for different ones."""
    rng = random.Random(f"{name}/{len(operands)}/{point.number}")
    total = mpf(0)
    for operand in map(number, operands):
        steepness, phase, slope = (rng.uniform(0.5, 2) for _ in range(3))
        total += mp.sin(steepness * operand + phase) + slope * operand
    return _computed(mp.mpmathify, total)


def _series(tree: tuple, point: Point) -> Value:
    kind, variable, start, end, body = tree
    first, last = evaluate(start, point), evaluate(end, point)
    if last == mp.inf:
        return _calculus(tree, point)
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
    """Return the value of an integral between limits, a derivative, a limit (from above) or an infinite series, to
    about 20 digits."""

    def body(value: Value) -> Value:
        return number(evaluate(tree[-1], replace(point, bound={**point.bound, tree[1]: value})))

    with mp.workdps(30):
        if tree[0] == "derivative":
            return _computed(mp.diff, body, number(point.symbol(tree[1])))
        places = [number(evaluate(limit, point)) for limit in tree[2:-1]]
        if tree[0] == "limit":
            return _computed(mp.limit, body, *places)
        return _computed({"integral": mp.quad, "sum": mp.nsum, "product": mp.nprod}[tree[0]], body, places)
