"""What the model writes as arguments of a function, and what it reads about the function."""

import json

import pytest

from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.function_calls import call_arguments, describe_function


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


def test_a_description_has_the_schema_and_is_one_bounded_line():
    text = describe_function("Finds\npassages.", SEARCH)
    assert text.startswith("Finds passages. Arguments: a JSON object, {") and text.endswith(
        "The text of query alone will do."
    )
    properties, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    assert properties == {"properties": SEARCH["properties"], "required": ["query"]}
    assert describe_function("", ADD).startswith("Arguments: ")


def test_of_a_long_schema_only_the_names_are_shown():
    names = [f"argument_{i}" for i in range(1000)]
    text = describe_function("a " * 10_000, schema(["argument_999"], **dict.fromkeys(names, "string")))
    assert len(text) < 2500 and "\n" not in text and "Arguments: a JSON object with argument_0, argument_1, " in text
    assert text.endswith(". Required are: argument_999. The text of argument_999 alone will do.")
    choices = {"enum": [f"choice {i}" for i in range(1000)]}
    text = describe_function("", {"properties": {"choice": choices, "n": {"type": "integer"}}})
    assert text == "Arguments: a JSON object with choice, n. Required are: none."


def test_a_reference_is_shown_with_its_definition():
    defined = {"City": {"type": "object", "properties": {"name": {"type": "string"}}}}
    referring = {"properties": {"to": {"$ref": "#/$defs/City"}}, "required": ["to"], "$defs": defined}
    text = describe_function("", referring)
    assert json.loads(text.removeprefix("Arguments: a JSON object, ")) == referring


def test_text_in_other_scripts_stays_readable():
    about = {"properties": {"город": {"type": "string", "description": "都市の名前 \u2028 ü"}}}
    text = describe_function("Погода.", about)
    assert text.startswith("Погода.") and '"город": {"type": "string", "description": "都市の名前 ü"}' in text
