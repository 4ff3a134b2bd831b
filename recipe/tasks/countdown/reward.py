"""Scores Countdown answers by exact rational arithmetic while it reads them, never by `eval`.

The answer is the last `<answer>...</answer>` of the response. It may be hostile: its length, characters and nesting are
bounded before it is read, so that any input is scored within milliseconds. The reader is the project's own, as rewards
are computed in threads and Python 3.11's `ast.parse` raises SystemError when threads use it at the same time.
"""

import operator
import re
from fractions import Fraction
from itertools import accumulate

from verl.utils.reward_score.ground_truth import as_list, json_object, whole_number
from verl.utils.reward_score.tool_format import last_tagged

MAX_ANSWER_CHARS = 256
MAX_DEPTH = 32
MOST_NUMBER = 10**9 - 1  # largest number of a problem: an answer's numbers have at most nine digits
_ALLOWED = frozenset("0123456789+-*/() ")
_TOKEN = re.compile(r"\d+|[-+*/()]")
_NUMBER = re.compile(r"0+|[1-9]\d{0,8}")
_END = ""
# each operator's precedence and operation
_OPERATORS = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)}
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})  # noqa: RUF001


class NotAnExpression(ValueError):
    """The text is not one arithmetic expression of plain integers."""


def last_answer(text: str) -> str | None:
    """Return the content of the last closed `<answer>`, without a trailing `= value`; None if there is none, or if it
    has more than 256 characters."""
    content = last_tagged(text)
    return None if content is None or len(content) > MAX_ANSWER_CHARS else content.split("=")[0].strip()


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Return the value and the integers (in reading order) of an expression of integers, binary `+ - * /` and
    parentheses. NotAnExpression is raised for any other text, and for a division by zero."""
    expression = expression.translate(_SPELLINGS)
    if not expression or len(expression) > MAX_ANSWER_CHARS or not _ALLOWED.issuperset(expression):
        raise NotAnExpression("characters other than digits, + - * / ( ) and spaces, or too many")
    if max(accumulate((char == "(") - (char == ")") for char in expression)) > MAX_DEPTH:
        raise NotAnExpression(f"nested deeper than {MAX_DEPTH}")
    tokens = _TOKEN.findall(expression)
    rest = [*tokens, _END][::-1]  # The next token is the last of the list.
    try:
        value = _read(rest)
    except ZeroDivisionError as error:
        raise NotAnExpression("division by zero") from error
    if rest != [_END]:
        raise NotAnExpression("an operator is missing, or a parenthesis is closed that was not opened")
    return value, [int(token) for token in tokens if token.isdigit()]


def _read(rest: list[str], precedence: int = 0) -> Fraction:
    """Take an operand, and the operators after it that bind more tightly than `precedence`; return the value."""
    token = rest.pop()
    if token == "(":
        value = _read(rest)
        if rest.pop() != ")":
            raise NotAnExpression("a parenthesis is not closed")
    elif _NUMBER.fullmatch(token):
        value = Fraction(int(token))
    else:
        raise NotAnExpression(f"not a whole number of at most nine digits without leading zeros: {token!r}")
    while rest[-1] in _OPERATORS and _OPERATORS[rest[-1]][0] > precedence:
        strength, operation = _OPERATORS[rest.pop()]
        value = operation(value, _read(rest, strength))
    return value


def countdown_truth(ground_truth) -> tuple[int, list[int]]:
    """Return the target and the numbers of a Countdown problem."""
    problem = json_object(ground_truth, "target and numbers")
    numbers = as_list("numbers", problem.get("numbers"), "whole numbers")
    target = whole_number("target", problem.get("target"))
    return target, [whole_number("numbers", number, 0, MOST_NUMBER) for number in numbers]


def check_row(data_source, ground_truth, extra_info=None, **kwargs) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row."""
    countdown_truth(ground_truth)


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, format_score: float = 0.1, score: float = 1.0, **kwargs
) -> dict:
    """Score a response by its last `<answer>expression</answer>`; the ground truth may be JSON text.

    An expression that uses every number exactly once gets `score` if it reaches the target, else `format_score`. The
    result has `score` (0 if the answer breaks the rules); `acc` (1 if it reaches the target); `format` (1 if it uses
    every number exactly once); `pred`, the value that it votes for, empty for an answer that breaks the rules.
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
