"""Scores Countdown answers by exact rational arithmetic while it reads them, never by `eval`.

The answer is the last `<answer>...</answer>` of the response. It may be hostile: its length, characters and nesting are
bounded before it is read, so that any input is scored within milliseconds. The reader is the project's own, as rewards
are computed in threads and Python 3.11's `ast.parse` raises SystemError when threads use it at the same time.
"""

import re
from fractions import Fraction
from itertools import accumulate

from verl.utils.reward_score.ground_truth import countdown_truth

MAX_ANSWER_CHARS = 256
MAX_DEPTH = 32
MAX_DIGITS = 9
_ALLOWED = frozenset("0123456789+-*/() ")
_TOKEN = re.compile(r"\d+|[-+*/()]")
_END = ""
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})  # noqa: RUF001


class NotAnExpression(ValueError):
    """The text is not one arithmetic expression of plain integers."""


def last_answer(text: str) -> str | None:
    """Return the content of the last closed `<answer>` tag, without a trailing `= value`; None without a tag."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    content = text[start + len("<answer>") : end]
    if len(content) > MAX_ANSWER_CHARS:
        return None
    return content.split("=")[0].strip()


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Return the value and the integers (in reading order) of an expression of integers, `+ - * /` and parentheses.

    All operators are binary: Countdown's `-` takes two numbers.

    Raises:
        NotAnExpression: the text is anything else, or divides by zero.
    """
    expression = expression.translate(_SPELLINGS)
    if not expression or len(expression) > MAX_ANSWER_CHARS or not _ALLOWED.issuperset(expression):
        raise NotAnExpression("characters other than digits, + - * / ( ) and spaces, or too many")
    if max(accumulate((char == "(") - (char == ")") for char in expression)) > MAX_DEPTH:
        raise NotAnExpression(f"nested deeper than {MAX_DEPTH}")
    numbers: list[int] = []
    tokens = [*_TOKEN.findall(expression), _END][::-1]  # the next token is the last of the list
    value = _sum(tokens, numbers)
    if tokens != [_END]:
        raise NotAnExpression("an operator is missing, or a parenthesis is closed that was not opened")
    return value, numbers


def _sum(tokens: list[str], numbers: list[int]) -> Fraction:
    value = _product(tokens, numbers)
    while tokens[-1] in ("+", "-"):
        sign = 1 if tokens.pop() == "+" else -1
        value += sign * _product(tokens, numbers)
    return value


def _product(tokens: list[str], numbers: list[int]) -> Fraction:
    value = _operand(tokens, numbers)
    while tokens[-1] in ("*", "/"):
        operator, operand = tokens.pop(), _operand(tokens, numbers)
        if operator == "/" and operand == 0:
            raise NotAnExpression("division by zero")
        value = value * operand if operator == "*" else value / operand
    return value


def _operand(tokens: list[str], numbers: list[int]) -> Fraction:
    """Read a number, or a sum in parentheses; a sign, a second operator or the end of the text is neither."""
    if tokens[-1] == "(":
        tokens.pop()
        value = _sum(tokens, numbers)
        if tokens.pop() != ")":
            raise NotAnExpression("a parenthesis is not closed")
        return value
    token = tokens.pop()
    if not token.isdigit() or len(str(int(token))) > MAX_DIGITS or (token[0] == "0" and token.strip("0")):
        raise NotAnExpression(f"not a whole number of at most {MAX_DIGITS} digits without leading zeros: {token!r}")
    numbers.append(int(token))
    return Fraction(numbers[-1])


def check_row(data_source, ground_truth, extra_info=None, **kwargs) -> None:
    """Check that `compute_score`, which has the same arguments, can score responses to a row.

    Raises:
        ValueError: the ground truth is no Countdown problem.
    """
    countdown_truth(ground_truth)


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, format_score: float = 0.1, score: float = 1.0, **kwargs
) -> dict:
    """Score a response.

    Args:
        solution_str: the response as text; the answer is its last `<answer>expression</answer>`.
        ground_truth: `{"target": int, "numbers": [int, ...]}`, or the same as JSON text.
        format_score: the score of an expression that uses every number exactly once but misses the target.
        score: the score of an expression that also reaches the target.

    Returns:
        `score`; `acc` and `format` (0 or 1); `pred`, the value that the answer votes for in majority votes: empty for
        an answer that breaks the rules, so that a wrong answer cannot win with a right value.

    Raises:
        ValueError: the ground truth is no Countdown problem: the data are wrong, not the response.
    """
    nothing = {"score": 0.0, "acc": 0.0, "format": 0.0, "pred": ""}
    target, numbers = countdown_truth(ground_truth)
    answer = last_answer(solution_str) if isinstance(solution_str, str) else None
    if answer is None:
        return nothing
    try:
        value, used = evaluate(answer)
    except NotAnExpression:
        return nothing
    if sorted(used) != sorted(numbers):
        return nothing
    reached = value == target
    return {"score": score if reached else format_score, "acc": float(reached), "format": 1.0, "pred": str(value)}
