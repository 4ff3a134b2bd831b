"""Scores an arithmetic answer: the last number of the last `\\boxed{...}`, or of the whole response if it has no box.

Numbers are compared exactly. A fraction such as 3/4 is a number; a thousands separator and an end of a sentence are not
part of the value; LaTeX's \\frac of two numbers is read. Every response is scored in time linear in its length.
"""

import math
import re
from collections import deque
from fractions import Fraction

from verl.utils.math_answers.comparison import last_boxed

MAX_DIGITS = 32
_PART = r"(?:\d+(?:,\d+)*(?:\.\d+)?|(?<![\w.])\.\d+)"
# A minus after a number, a letter or a parenthesis is an operator, not a sign.
_NUMBER = re.compile(rf"(?P<sign>(?<![\w)])[-\u2212])?(?P<numerator>{_PART})(?:/(?P<denominator>{_PART}))?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d)")


def last_number(text: str) -> Fraction | None:
    """Return the value of a text's last number; None if there is none, it divides by zero or has more than 32 digits.

    >>> [str(last_number(text)) for text in ("12 - 4 = 8.", "It costs $1,250.50", "a loss of -3", "half: 1/2", "5,6")]
    ['8', '2501/2', '-3', '1/2', '6']
    >>> [str(last_number(text)) for text in (r"\\frac{3}{4}", r"1{,}000", "it is .5", "1,000, I think")]
    ['3/4', '1000', '1/2', '1000']
    """
    text = _FRACTION.sub(r"\1/\2", _SEPARATOR.sub(",", text))
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    if not numbers:
        return None
    last = numbers.pop()
    sign, numerator, denominator = last["sign"] or "", last["numerator"], last["denominator"] or ""
    if denominator and (alone := _last_of_list(denominator)) != denominator.replace(",", ""):
        sign, numerator, denominator = "", alone, ""
    elif (alone := _last_of_list(numerator)) != numerator.replace(",", ""):
        sign, numerator = "", alone
    if sum(char.isdigit() for char in numerator + denominator) > MAX_DIGITS:
        return None
    value, divisor = Fraction(numerator.replace(",", "")), Fraction(denominator.replace(",", "") or 1)
    return (-value if sign else value) / divisor if divisor else None


def _last_of_list(number: str) -> str:
    """Return the number without its separators of thousands, or the last number of a list such as 5,6."""
    whole, point, decimals = number.partition(".")
    first, *others = whole.split(",")
    if others and (len(first) > 3 or any(len(other) != 3 for other in others)):
        return others[-1] + point + decimals
    return number.replace(",", "")


def check_row(data_source, ground_truth, extra_info=None, **kwargs) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row."""
    _truth(data_source, ground_truth)


def _truth(data_source, ground_truth) -> Fraction:
    if isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool) and math.isfinite(ground_truth):
        return Fraction(str(ground_truth))  # 0.1 is a tenth, and 1e22 has an exponent
    truth = last_number(ground_truth) if isinstance(ground_truth, str) else None
    if truth is None:
        raise ValueError(f"ground_truth of a {data_source} problem must be a number, got {ground_truth!r}")
    return truth


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Return `score` and `acc` (0 or 1) of a response, and `pred`, the number that it votes for, empty without one."""
    truth = _truth(data_source, ground_truth)
    response = solution_str if isinstance(solution_str, str) else ""
    boxed = last_boxed(response)
    value = last_number(response if boxed is None else boxed)
    right = float(value == truth)
    return {"score": right, "acc": right, "pred": "" if value is None else str(value)}
