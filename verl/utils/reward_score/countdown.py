"""Scores Countdown answers by exact rational arithmetic on the syntax tree, never by `eval`.

The answer is the last `<answer>...</answer>` of the response. It may be hostile: its length, characters and nesting are
bounded before it is parsed, so that any input is scored within milliseconds.
"""

import ast
import json
import re
from fractions import Fraction
from itertools import accumulate

MAX_ANSWER_CHARS = 256
MAX_DEPTH = 32
MAX_DIGITS = 9
_ALLOWED = frozenset("0123456789+-*/() ")
_CALL = re.compile(r"[\d)] *\(")  # such as 3(4), which Python reads as a call and warns about
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})  # noqa: RUF001


class NotAnExpression(ValueError):
    """The text is not one arithmetic expression of plain integers."""


def last_answer(text: str) -> str | None:
    """The content of the last closed `<answer>` tag, without a trailing `= value`; None if there is no such tag."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    content = text[start + len("<answer>") : end]
    if len(content) > MAX_ANSWER_CHARS:
        return None
    return content.split("=")[0].strip()


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The value and the integers (in reading order) of an expression of integers, `+ - * /` and parentheses.

    All operators are binary: Countdown's `-` takes two numbers.

    Raises:
        NotAnExpression: the text is anything else, or divides by zero.
    """
    expression = expression.translate(_SPELLINGS)
    if not expression or len(expression) > MAX_ANSWER_CHARS or not _ALLOWED.issuperset(expression):
        raise NotAnExpression("characters other than digits, + - * / ( ) and spaces, or too many")
    if max(accumulate((char == "(") - (char == ")") for char in expression)) > MAX_DEPTH:
        raise NotAnExpression(f"nested deeper than {MAX_DEPTH}")
    if _CALL.search(expression):
        raise NotAnExpression("a number or parenthesis directly before a parenthesis")
    try:
        tree = ast.parse(expression.strip(), mode="eval")  # a leading space would be an indentation
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAnExpression("not one arithmetic expression") from error
    numbers: list[int] = []
    return _value(tree.body, numbers), numbers


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int and len(str(node.value)) <= MAX_DIGITS:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div() if right != 0:
                return left / right
    raise NotAnExpression("only whole numbers, binary + - * / and parentheses; no division by zero")


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
    """
    nothing = {"score": 0.0, "acc": 0.0, "format": 0.0, "pred": ""}
    if isinstance(ground_truth, str):
        ground_truth = json.loads(ground_truth)
    answer = last_answer(solution_str) if isinstance(solution_str, str) else None
    if answer is None:
        return nothing
    try:
        value, used = evaluate(answer)
    except NotAnExpression:
        return nothing
    if sorted(used) != sorted(int(number) for number in ground_truth["numbers"]):
        return nothing
    reached = value == int(ground_truth["target"])
    return {"score": score if reached else format_score, "acc": float(reached), "format": 1.0, "pred": str(value)}
