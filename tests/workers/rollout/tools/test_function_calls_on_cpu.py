"""Tests of how the arguments that a model writes for a function are read."""

import pytest

from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.function_calls import call_arguments


def schema(required=(), **types) -> dict:
    return {
        "type": "object",
        "properties": {n: {"type": kind} for n, kind in types.items()},
        "required": list(required),
    }


SEARCH = schema(["query"], query="string", n="integer")
ADD = schema(["a", "b"], a="integer", b="integer")


@pytest.mark.parametrize(
    ("function", "content", "arguments"),
    [
        (SEARCH, "otters", {"query": "otters"}),
        (SEARCH, ' {"query": "otters", "n": 2}\n', {"query": "otters", "n": 2}),
        (SEARCH, '{"n": 2}', {"query": '{"n": 2}'}),
        (SEARCH, '["otters"]', {"query": '["otters"]'}),
        (SEARCH, '{"query": NaN}', {"query": '{"query": NaN}'}),
        (ADD, '{"a": 1, "b": 2}', {"a": 1, "b": 2}),
        (schema(), "", {}),
        (schema(n="integer"), " ", {}),
        ({}, "{}", {}),
    ],
)
def test_arguments_are_a_json_object_or_the_text_of_the_only_required_string(function, content, arguments):
    assert call_arguments(function, content) == arguments


@pytest.mark.parametrize(
    ("function", "content", "message"),
    [
        (ADD, "3", "Expected a JSON object with a, b."),
        (ADD, '{"a": 1}', "Missing arguments: b."),
        (SEARCH, "", "Missing arguments: query."),
        (schema(["a"], a="integer"), "one", "Expected a JSON object with a."),
        # A request cannot hold these: the first is half a character, the others are lists within lists.
        (ADD, '{"a": "\\ud800", "b": 2}', "Expected a JSON object with a, b."),
        (ADD, '{"a": ' + "[" * 300 + "]" * 300 + ', "b": 2}', "Expected a JSON object with a, b."),
        (ADD, "[" * 100_000, "Expected a JSON object with a, b."),
        (ADD, '{"a": Infinity, "b": 2}', "Expected a JSON object with a, b."),
    ],
)
def test_other_texts_are_the_models_mistake(function, content, message):
    with pytest.raises(ToolError) as caught:
        call_arguments(function, content)
    assert (str(caught.value), caught.value.kind, caught.value.own_fault) == (message, "bad_arguments", False)
