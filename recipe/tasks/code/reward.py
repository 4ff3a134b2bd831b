"""Scores the last ```python block of a response by tests that the solution's process cannot see.

The ground truth is that of verl's `prime_code`, an object or its JSON text:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                     a program that reads standard input
    {"fn_name": "add", "inputs": ["1\\n2"], "outputs": ["3"]}      a function; a line of JSON is an argument
    {"assert_case": ["assert add(1, 2) == 3"]}                     statements, as in MBPP

`assert_case` may come with `setup`, which runs before each case; `entry_point`, the function that is the solution's (by
default each that is unknown and no builtin); and `prompt`, code that stands before the solution, as in HumanEval.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from decimal import Decimal
from functools import partial
from typing import Any

from recipe.common.problem_files import require
from recipe.tasks.code.sandbox import Limits, Sandbox, run, sandbox_of
from verl.utils.reward_score.ground_truth import as_list, json_object
from verl.workers.config.keys import read_keys

MAX_TEST_CHARS = 1 << 19  # limit for input and output; longer tests are left out, because a program has at most 1 MiB
# The closing fence begins or ends a line; others belong to the code.
_FENCE = re.compile(
    r"```(?:python|py)\d?[ \t]*\r?\n(.*?)(?:^[ \t]*```|```[ \t\r]*$|\Z)", re.DOTALL | re.IGNORECASE | re.MULTILINE
)
_WHOLE = re.compile(r"[-+]?\d+")
INSTRUCTION = "Write the whole solution in one ```python block."
_PARTS = "inputs and outputs, or assert_case"

# whether a solution passes a test
Test = Callable[[Sandbox, str], bool]


def read_tests(truth: Mapping[str, Any]) -> list[Test]:
    """Return the tests in a ground truth. Raise ValueError, which names the key, for one that has none."""
    if truth.get("assert_case") is not None:
        texts = {name: truth.get(name) or "" for name in ("setup", "entry_point", "prompt")}
        cases = as_list("assert_case", truth["assert_case"], "texts")
        for name, text in [*texts.items(), *(("assert_case", case) for case in cases)]:
            is_text = isinstance(text, str) and (name != "assert_case" or bool(text.strip()))
            require(is_text, f"ground_truth: {name}", text, "a text")
        return [partial(_passes_assert, texts["setup"], case, texts["entry_point"]) for case in cases]
    inputs, outputs = (as_list(name, truth.get(name), f"tests: expected {_PARTS}") for name in ("inputs", "outputs"))
    if len(inputs) != len(outputs):
        raise ValueError(f"ground_truth: {len(inputs)} inputs and {len(outputs)} outputs: expected equal numbers")
    function, tests = truth.get("fn_name"), []
    require(function is None or str(function).isidentifier(), "ground_truth: fn_name", function, "a name")
    for number, (case, expected) in enumerate(zip(inputs, outputs, strict=True)):
        case, expected = (value.tolist() if hasattr(value, "tolist") else value for value in (case, expected))
        try:
            test = _program_test(case, expected) if function is None else _function_test(function, case, expected)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"ground_truth: inputs or outputs of test {number}: {error}") from error
        if max(len(ascii(case)), len(ascii(expected))) <= MAX_TEST_CHARS:
            tests.append(test)
    require(bool(tests), "ground_truth: inputs", f"{len(inputs)} tests", f"one of at most {MAX_TEST_CHARS} characters")
    return tests


def _program_test(case: Any, expected: Any) -> Test:
    text, lines = ("\n".join(value) if isinstance(value, list) else value for value in (case, expected))
    if not isinstance(text, str) or not isinstance(lines, str):
        raise TypeError("expected texts, or a fn_name")
    return partial(_passes, "run_program", ascii(text), partial(same_lines, lines))


def _function_test(name: str, case: Any, expected: Any) -> Test:
    """Return the test of a function; `case` is a list of arguments as in APPS, or a text with a line for each."""
    if isinstance(case, str):
        case, expected = [json.loads(line) for line in case.split("\n")], json.loads(expected)
    if not isinstance(case, list):
        raise TypeError("expected a line of JSON for each argument")
    return partial(_passes, "run_function", f"{name!r}, {json.dumps(case)!r}", partial(same_value, expected))


def _passes(function: str, rest: str, is_right: Callable[[str], bool], sandbox: Sandbox, code: str) -> bool:
    output = run(lambda: sandbox.output(f"{function}({code!r}, {rest})"))
    return output is not None and is_right(output.decode("utf-8", "replace"))


def _passes_assert(setup: str, case: str, entry_point: str, sandbox: Sandbox, code: str) -> bool:
    return bool(run(lambda: sandbox.passes(code, setup, case, entry_point)))


def same_lines(expected: str, printed: str) -> bool:
    """Return whether the lines are equal, apart from empty lines, blanks and the digits that `numpy.allclose` ignores;
    a number that should be whole may be off by 1e-5.

    >>> same_lines("1 2\\n0.5", " 1  2 \\n\\n0.5000001\\n"), same_lines("a b", "a\\nb")
    (True, False)
    >>> same_lines("100000", "100001.0"), same_lines("3", "2.9999999"), same_lines("1000", "1_000")
    (False, True, False)
    """
    lines, own = ([line.split() for line in text.splitlines() if line.strip()] for text in (expected, printed))
    pairs = zip(lines, own, strict=False)
    return len(lines) == len(own) and all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in pairs)


def _same_word(expected: str, printed: str) -> bool:
    is_whole = _WHOLE.fullmatch(expected)
    if expected == printed or "_" in printed or is_whole and _WHOLE.fullmatch(printed):
        return expected == printed
    try:
        if is_whole:
            return bool(abs(Decimal(expected) - Decimal(printed)) <= Decimal("1e-5"))
        return math.isclose(float(expected), float(printed), rel_tol=1e-5, abs_tol=1e-8)
    except (ValueError, ArithmeticError):
        return False


def same_value(expected: Any, printed: str) -> bool:
    """Return whether a function's result, as JSON, is the expected value, which APPS may put into a list of its own.

    >>> same_value([[1, 2]], "[1, 2]"), same_value([1], "1"), same_value([1, 2], "1"), same_value(1, "]")
    (True, True, False, False)
    """
    try:
        value = json.loads(printed)
        return bool(value == expected or isinstance(expected, list) and len(expected) == 1 and value == expected[0])
    except (ValueError, RecursionError):
        return False


def code_of(response: str, prompt: str = "") -> str | None:
    """Return the last ```python block after the code of the prompt; without a block, the response may go on from it."""
    blocks = _FENCE.findall(response)
    if not blocks:
        return prompt + response if prompt else None
    return f"{prompt}\n{blocks[-1]}"


def _checked(ground_truth: Any, continuous: Any, max_tests: Any, settings: dict) -> tuple[list[Test], str, Sandbox]:
    """Return the tests, the prompt's code and the sandbox. Raise ValueError for a bad row or setting."""
    require(isinstance(continuous, bool), "continuous", continuous, "true or false")
    require(max_tests is None or type(max_tests) is int and max_tests > 0, "max_tests", max_tests, "a number above 0")
    names = {field.name for field in fields(Limits)}
    limits = {name: value for name, value in settings.items() if name in names}
    sandbox = sandbox_of(read_keys(Limits, limits, "reward_kwargs"))
    truth = json_object(ground_truth, _PARTS)
    if sandbox.sessions is None and truth.get("assert_case") is not None:
        raise ValueError("sandbox_fusion_url: expected none of it for rows with assert_case, as it has no sessions")
    return read_tests(truth)[:max_tests], truth.get("prompt") or "", sandbox


def check_row(data_source, ground_truth, extra_info=None, continuous=False, max_tests=None, **settings) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row."""
    _checked(ground_truth, continuous, max_tests, settings)


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, continuous=False, max_tests=None, **settings
) -> dict:
    """Score a response.

    Args:
        continuous: whether `score` is the share of the tests passed; otherwise it is `acc`, and the first failure ends
            the tests.
        max_tests: largest number of tests, the first of the row; None: all.
        settings: fields of `Limits`.

    Returns:
        `score`; `acc`, 1 if all tests passed, else 0; `pred`, the solution, empty without one.
    """
    tests, prompt, sandbox = _checked(ground_truth, continuous, max_tests, settings)
    code, passed = code_of(solution_str, prompt), 0
    for test in tests:
        if code is not None and test(sandbox, code):
            passed += 1
        elif not continuous:
            break
    acc = float(passed == len(tests))
    return {"score": passed / len(tests) if continuous else acc, "acc": acc, "pred": (code or "").strip()}
