"""Reads the notations of a formula that are more than one operand: fractions, roots, sums, integrals, matrices.

Each function takes a reader of `answer_formula` behind the command, and consumes what belongs to it.
"""

import re
from fractions import Fraction
from typing import Any

from verl.utils.reward_score.answer_tokens import Token, Unreadable
from verl.utils.reward_score.answer_words import MATRICES


def read_fraction(reader: Any) -> tuple:
    """Read a fraction; d/dx takes the derivative of what follows, and dy/dx is the symbol y'."""
    following = " ".join(token.text for token in reader.tokens[reader.place : reader.place + 8])
    if match := re.match(r"{ d } { d (\w+) }", following):
        reader.place += 7
        return ("derivative", match[1], reader.product())
    if match := re.match(r"{ d (\w+) } { d (\w+) }", following):
        reader.place += 8
        return ("symbol", f"{match[1]}'" if match[2] == "x" else f"d{match[1]}/d{match[2]}")
    return ("divide", reader.group(), reader.group())


def read_root(reader: Any) -> tuple:
    """Read the degree in brackets, if there is one, and what the root is taken of."""
    degree: tuple = ("number", Fraction(2), 0)
    if reader.accept("["):
        degree = reader.in_brackets("[")
    if reader.next.kind == "number":
        return ("function", "root", reader.operand(), degree)
    return ("function", "root", reader.in_brackets("(") if reader.accept("(") else reader.group(), degree)


def read_limits(reader: Any) -> tuple[list[Token], list[Token]]:
    """Read the limits below and above a sign."""
    below: list[Token] = []
    above: list[Token] = []
    for _ in range(2):
        if reader.accept("_"):
            below = reader.taken_argument()
        elif reader.accept("^"):
            above = reader.taken_argument()
    if not below or not above:
        raise Unreadable("limits are missing")
    return below, above


def read_series(reader: Any, name: str) -> tuple:
    """Read the limits and the terms of a sum or product."""
    below, above = read_limits(reader)
    below = [token for token in below if token.text not in ("{", "}")]
    if len(below) < 3 or below[0].kind != "symbol" or below[1].text != "=":
        raise Unreadable("a sum over something else than a variable")
    kind = {"sum": "sum", "prod": "product"}[name]
    return (kind, below[0].text, reader.parsed(below[2:]), reader.inside(above), reader.product())


def read_integral(reader: Any) -> tuple:
    """Read the limits of an integral, and what is integrated, up to dx."""
    below, above = read_limits(reader)
    for place in range(reader.place, len(reader.tokens) - 1):
        if reader.tokens[place].text == "d" and reader.tokens[place + 1].kind == "symbol":
            body = reader.tokens[reader.place : place] or [Token("number", "1")]
            reader.place = place + 2
            return (
                "integral",
                reader.tokens[place + 1].text,
                reader.inside(below),
                reader.inside(above),
                reader.parsed(body),
            )
    raise Unreadable("an integral without dx")


def read_matrix(reader: Any, name: str) -> tuple:
    """Read the rows of a matrix up to the end of its environment."""
    if name not in MATRICES | {"vmatrix"}:
        raise Unreadable(f"environment {name!r}")
    rows: list[tuple] = []
    row: list[tuple] = []
    while not reader.accept(f"end {name}"):
        row.append(reader.sum())
        if not reader.accept("&"):
            rows.append(tuple(row))
            row = []
            if not reader.accept("\\\\") and reader.next.text != f"end {name}":
                raise Unreadable("a row of a matrix is not closed")
    if row or len({len(row) for row in rows}) != 1:
        raise Unreadable("the rows of a matrix have several lengths")
    matrix = ("matrix", tuple(rows))
    return ("function", "det", matrix) if name == "vmatrix" else matrix


def is_number(tree: tuple) -> bool:
    return tree[0] == "number" or (tree[0] == "negative" and is_number(tree[1]))


def beside(left: tuple, right: tuple) -> tuple:
    """Two factors beside each other: their product, but 3 1/2 and 3\\frac{1}{2} are mixed numbers."""
    is_fraction = right[0] == "divide" and all(part[0] == "number" and part[1] >= 0 for part in right[1:])
    if left[0] == "number" and left[1].denominator == 1 and not left[2] and is_fraction:
        return ("mixed", left, right)
    return multiplied(left, right, "")


def multiplied(left: tuple, right: tuple, sign: str) -> tuple:
    """The product of two factors, in which the order counts for a cross product and for matrices with bold names."""
    names = [_last_bold_name(factor) for factor in (left, right)]
    if sign == "times" and all(names):
        return ("add", ("unknown", "times", left, right), ("negative", ("unknown", "times", right, left)))
    if all(name.isupper() for name in names):
        return ("unknown", "matrix product", left, right)
    return ("multiply", left, right)


def _last_bold_name(tree: tuple) -> str:
    """The name of a vector or matrix in a formula, without what makes it bold; empty if there is none."""
    if tree[0] == "symbol":
        return tree[1].removesuffix(" in bold") if tree[1].endswith(" in bold") else ""
    names = [
        _last_bold_name(part) for part in tree[1:] if isinstance(part, tuple) and part and isinstance(part[0], str)
    ]
    return next((name for name in reversed(names) if name), "")
