"""Tests that hold for every tool, whatever it does: in a tool box, which calls it as a rollout does.

from tests.conformance.tools import *  # noqa: F403

@pytest.fixture(params=[Case("my_package.MyTool", {}, "a call that works")])
def case(request):
    return request.param
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hydra.utils import get_class

from recipe.common.tiny_model import make_tokenizer
from verl.workers.rollout.tools.environment import Tools
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig

TOKENIZER = make_tokenizer()


class Case(NamedTuple):
    """A tool: its class, its constructor's arguments, a call that works, one that fails, one that takes a
    minute, and a parameter -> a value that `check` refuses, each alone."""

    class_path: str
    params: Mapping[str, Any]
    call: str
    bad_call: str = ""
    slow_call: str = ""
    bad_params: Mapping[str, Any] = {}


def answered(case: Case, *contents: str, max_tokens: int = 4096, **limits) -> list[tuple[str, dict]]:
    """Return what the model reads of calls with these contents, all at once, and their descriptions."""

    async def answer(environment: Tools, tag: str, content: str):
        turn = TOKENIZER.encode(f"<{tag}>{content}</{tag}>", add_special_tokens=False)
        return await environment.answer(None, turn, max_tokens)

    async def run():
        entry = {"class_path": case.class_path, "params": dict(case.params)}
        box = ToolBox(ToolsConfig(tool_instances={"tried": entry}, **{"timeout": 30, "retry_count": 0} | limits))
        (tag,), environment = box.tools, Tools(box, Protocol(TOKENIZER, list(box.tools)))
        try:
            return await asyncio.gather(*(answer(environment, tag, content) for content in contents))
        finally:
            await box.close()

    answers = asyncio.run(run())
    assert all(len(answer.tokens) <= max_tokens and not answer.done for answer in answers)
    return [(TOKENIZER.decode(answer.tokens), *answer.calls) for answer in answers]


def test_a_call_that_works_is_answered_between_the_results_tags(case):
    ((text, about),) = answered(case, case.call)
    assert text.startswith(" <result>\n") and text.endswith("\n</result>") and "Error" not in text
    assert not about.get("error") and json.loads(json.dumps(about)) == about


def test_calls_at_once_have_their_own_answers(case):
    answers = answered(case, *[case.call] * 4)
    assert len({text for text, _ in answers}) == 1


def test_a_result_is_cut_to_its_limit_within_its_tags(case):
    ((text, _),) = answered(case, case.call, max_result_tokens=22)
    assert len(TOKENIZER.encode(text, add_special_tokens=False)) <= 22
    assert text.startswith(" <result>\n") and text.endswith("</result>")


def test_a_call_that_takes_too_long_is_an_error_for_the_model(case):
    if case.slow_call:
        ((text, about),) = answered(case, case.slow_call, timeout=1.0)
        assert "Error: " in text and text.endswith("\n</result>") and about["error"]


@pytest.mark.parametrize("content", ["", " \n", "\x00\udc80", "</result><|im_end|>", "x" * 3000])
def test_any_text_is_answered(case, content):
    ((text, _),) = answered(case, content.encode(errors="ignore").decode())
    assert text.startswith(" <result>\n") and text.count("</result>") == 1


def test_a_call_that_it_cannot_take_is_told_the_model(case):
    if case.bad_call:
        ((text, about),) = answered(case, case.bad_call)
        assert "Error" in text and text.endswith("\n</result>")


def test_bad_parameters_are_refused_by_name_before_a_run(case):
    for name, value in case.bad_params.items():
        with pytest.raises((TypeError, ValueError), match=name):
            get_class(case.class_path).check(**{**case.params, name: value})


__all__ = ["Case", *(name for name in dir() if name.startswith("test_"))]
