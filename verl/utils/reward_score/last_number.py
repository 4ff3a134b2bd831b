"""Scores an arithmetic answer: the last number of the last `\\boxed{...}`, or of the whole response if it has no box.

Numbers are compared exactly. A fraction such as 3/4 is a number; a thousands separator and an end of a sentence are not
part of the value. Every response is scored in time linear in its length.
"""

import re
from fractions import Fraction

from verl.utils.reward_score.math_equivalence import last_boxed

MAX_DIGITS = 32
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?"
# a minus after a number, a letter or a parenthesis is an operator
_NUMBER = re.compile(rf"(?:(?<![\w)])[-\u2212])?{_DIGITS}(?:/{_DIGITS})?")


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text; None if there is none, it divides by zero, or it has over 32 digits.

    >>> [str(last_number(text)) for text in ("12 - 4 = 8.", "It costs $1,250.50", "a loss of -3", "half: 1/2", "5,6")]
    ['8', '2501/2', '-3', '1/2', '6']
    """
    numbers = _NUMBER.findall(text)
    if not numbers or sum(char.isdigit() for char in numbers[-1]) > MAX_DIGITS:
        return None
    numerator, _, denominator = numbers[-1].replace(",", "").replace("\u2212", "-").partition("/")
    divisor = Fraction(denominator or 1)
    return Fraction(numerator) / divisor if divisor else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score a response.

    Args:
        ground_truth: a number, as text or not.

    Returns:
        `score` and `acc` (0 or 1), and `pred`, the number that the answer votes for in majority votes, empty if there
        is none.

    Raises:
        ValueError: the ground truth has no number: the data are wrong, not the response.
    """
    truth = last_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"ground_truth of a {data_source} problem must be a number, got {ground_truth!r}")
    response = solution_str if isinstance(solution_str, str) else ""
    boxed = last_boxed(response)
    value = last_number(response if boxed is None else boxed)
    right = float(value == truth)
    return {"score": right, "acc": right, "pred": "" if value is None else str(value)}
