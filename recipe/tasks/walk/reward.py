"""Scores number walks exactly: a walk goes from a start to a target in a fixed number of steps, with a line for each.

    start 3, target 22, steps 4, operations +5 *2 -3        3*2=6
                                                            6*2=12
                                                            12+5=17
                                                            17+5=22

The answer is the last `<answer>...</answer>` of the response, or all of a response without tags. It may be hostile: its
length is bounded before it is read, so that any input is scored within milliseconds.
"""

import operator
import re
from collections.abc import Mapping

from verl.utils.reward_score.ground_truth import as_list, json_object, whole_number
from verl.utils.reward_score.tool_format import last_tagged

MAX_ANSWER_CHARS = 1024
_LINE = re.compile(r"([0-9]{1,9})([-+*/])([0-9]{1,9})=([0-9]{1,9})")
_OPERATION = re.compile(r"[-+*/](?:0|[1-9][0-9]{0,8})")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", " ": None, "\t": None})  # noqa: RUF001


class BrokenRule(ValueError):
    """A walk breaks a rule; the message says which."""


def apply(operation: str, value: int, limit: int) -> int | None:
    """Return the value after an operation such as `+5`; None if it is no whole number from 0 to `limit`.

    >>> apply("+5", 3, 99), apply("/2", 7, 99), apply("-5", 3, 99)
    (8, None, None)
    """
    sign, operand = operation[0], int(operation[1:])
    if sign == "/" and (operand == 0 or value % operand):
        return None
    result = _OPERATORS[sign](value, operand)
    return result if 0 <= result <= limit else None


def follow(answer: str, truth: Mapping) -> tuple[list[str], int]:
    """Return the operations of a walk in order, and the number at which it ends.

    The answer has a line such as `3 + 5 = 8` for each step; spaces and empty lines are ignored. BrokenRule is raised if
    it is no walk with the `start`, `steps`, `operations` and `limit` of `truth`, or has more than 1024 characters.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        raise BrokenRule(f"longer than {MAX_ANSWER_CHARS} characters")
    lines = [line for line in answer.translate(_SPELLINGS).splitlines() if line]
    if len(lines) != truth["steps"]:
        raise BrokenRule(f"{len(lines)} lines, expected {truth['steps']}")
    value, path = truth["start"], []
    for line in lines:
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise BrokenRule(f"{line!r} is no step")
        left, sign, operand, written = parts.groups()
        operation = f"{sign}{int(operand)}"
        if int(left) != value or operation not in truth["operations"]:
            raise BrokenRule(f"{line!r}: expected {value} and one of {' '.join(truth['operations'])}")
        result = apply(operation, value, truth["limit"])
        if result is None or int(written) != result:
            raise BrokenRule(f"{line!r}: expected {result}")
        value = result
        path.append(operation)
    return path, value


def walk_of(ground_truth) -> dict:
    """Return the walk that a ground truth describes; see `compute_score`."""
    truth = json_object(ground_truth, "start, target, steps, operations and limit")
    least = {"start": 0, "target": 0, "steps": 1, "limit": 0}
    walk: dict = {name: whole_number(name, truth.get(name), low) for name, low in least.items()}
    operations = as_list("operations", truth.get("operations"), "operations such as '+5'")
    for operation in operations:
        if not isinstance(operation, str) or not _OPERATION.fullmatch(operation):
            raise ValueError(f"ground_truth: operations: {operation!r} is none such as '+5'")
    return walk | {"operations": operations}


def check_row(data_source, ground_truth, extra_info=None, **kwargs) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row."""
    walk_of(ground_truth)


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, format_score: float = 0.0, score: float = 1.0, **kwargs
) -> dict:
    """Score a response: a walk that keeps every rule gets `score` if it ends at the target, else `format_score`.

    The ground truth is `{"start": 3, "target": 22, "steps": 4, "operations": ["+5", "*2", "-3"], "limit": 99}` or its
    JSON text; all numbers of a walk are whole and lie between 0 and `limit`. The result has `score`; `acc` and `format`
    (0 or 1); `pred`, the operations, for votes and counts of distinct answers, empty if the answer breaks the rules.
    """
    nothing = {"score": 0.0, "acc": 0.0, "format": 0.0, "pred": ""}
    truth = walk_of(ground_truth)
    if not isinstance(solution_str, str):
        return nothing
    answer = last_tagged(solution_str)
    try:
        path, end = follow(solution_str if answer is None else answer, truth)
    except BrokenRule:
        return nothing
    reached = end == truth["target"]
    return {"score": score if reached else format_score, "acc": float(reached), "format": 1.0, "pred": " ".join(path)}
