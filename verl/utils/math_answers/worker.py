"""Compares mathematical answers in a process of its own, so that an endless comparison can be killed.

`comparison.py` starts this file as a script, with the folder of its sibling modules as argument: importing verl
would take seconds. Standard input is a socket to the parent. Each line from the parent is a JSON list
`[truth, answer, seconds]`; the reply is a byte, 1 or 0.
"""

import json
import logging
import math
import os
import random
import re
import resource
import signal
import sys
import warnings
from types import ModuleType
from typing import Any

from sympy import Expr, FiniteSet, Float, MatrixBase, N, Rational, Tuple

MEMORY_BYTES = 4 * 2**30
DIGITS = 50
_TOLERANCE = Float("1e-40", DIGITS)
_FOR_THE_LIBRARY = re.compile(r"\\(?:lim|sum|prod|i{1,3}nt|oint)(?![a-zA-Z])")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|mathbf|operatorname|textbf)[a-z]*\s*\{|[A-Za-z]{4,}\s+[A-Za-z]{2,}")


def is_equivalent(truth: str, answer: str) -> bool:
    """Return whether two answers are equal; False for answers that cannot be read.

    The project's own reader decides if it can read both. If not, math-verify decides, but only about answers with a
    limit, sum, product or integral; its verdict "equal" counts only if the values of the expressions that it read
    agree.
    """
    from verl.utils.math_answers.equality import is_equal
    from verl.utils.math_answers.tokens import Unreadable

    try:
        return is_equal(truth, answer)
    except (Unreadable, RecursionError):
        return bool(_FOR_THE_LIBRARY.search(truth + answer)) and is_equivalent_by_library(truth, answer)


def is_equivalent_by_library(truth: str, answer: str) -> bool:
    """Return whether math-verify finds the LaTeX `answer` equal to `truth`, and values confirm it."""
    from math_verify import LatexExtractionConfig, parse, verify

    from verl.utils.math_answers.tokens import cleaned

    # math-verify's time-outs are off: they print warnings and need the main thread. The parent kills this process.
    texts = [cleaned(text) for text in (truth, answer)]
    gold, parsed = (parse(f"\\boxed{{{text}}}", (LatexExtractionConfig(),), parsing_timeout=None) for text in texts)
    # allow_set_relation_comp makes x < 3 and (-oo, 3) equal, whichever of the two is the truth.
    is_equal = bool(gold and parsed) and verify(gold, parsed, timeout_seconds=None, allow_set_relation_comp=True)
    return is_equal and confirms(gold, parsed, *texts)


def confirms(gold: list[Any], parsed: list[Any], truth: str, answer: str) -> bool:
    """Return whether some expression that the library read from the truth has the same values as one from the answer.

    Values are computed with many digits at random points, component by component. Words and other things without values
    are never confirmed, as the library may compare only the first word.
    """
    if _WORDS.search(truth) or _WORDS.search(answer):
        return False
    return any(_agree(one, other) for one in gold for other in parsed)


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
    values = {name: Rational(rng.randrange(5, 61, 2), 16) for name in sorted(one.free_symbols, key=str)}
    first, second = (N(expression.subs(values).doit(), DIGITS) for expression in (one, other))
    are_numbers = first.is_number and second.is_number
    return bool(are_numbers and abs(first - second) <= _TOLERANCE * (abs(first) + abs(second)))


def serve(connection: int) -> None:
    """Answer every line of a socket until the parent closes it."""
    is_equivalent_by_library("1", "1")  # The first comparison imports everything.
    os.write(connection, b"r")
    with os.fdopen(os.dup(connection), encoding="utf-8") as jobs:
        for job in jobs:
            truth, answer, seconds = json.loads(job)
            signal.alarm(math.ceil(seconds) + 1)  # The alarm ends this process even if the parent is gone.
            try:
                verdict = is_equivalent(truth, answer)
            except Exception:  # Sympy raises many kinds of errors for hostile input, even RecursionError: not equal.
                verdict = False
            signal.alarm(0)
            os.write(connection, b"1" if verdict else b"0")


if __name__ == "__main__":
    # A module beside this file would hide a library of the same name.
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    for package in ("verl", "verl.utils", "verl.utils.math_answers"):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(sys.stdin.fileno())
