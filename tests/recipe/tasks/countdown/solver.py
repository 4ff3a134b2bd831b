"""Solves Countdown by trying everything."""

import itertools
import operator
from collections.abc import Sequence
from fractions import Fraction

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def solve(numbers: Sequence[int], target: int, operators: str = "+-*/") -> str | None:
    """An expression with every number exactly once that equals `target`; None if there is none."""

    def search(terms: list[tuple[Fraction, str]]) -> str | None:
        if len(terms) == 1:
            return terms[0][1] if terms[0][0] == target else None
        for i, j in itertools.permutations(range(len(terms)), 2):
            (left, left_text), (right, right_text) = terms[i], terms[j]
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for symbol in operators:
                if symbol != "/" or right:
                    combined = OPERATIONS[symbol](left, right), f"({left_text}{symbol}{right_text})"
                    if solution := search([*rest, combined]):
                        return solution
        return None

    return search([(Fraction(number), str(number)) for number in numbers])
