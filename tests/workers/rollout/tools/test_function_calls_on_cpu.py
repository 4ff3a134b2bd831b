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


def shown(text: str) -> tuple[dict, str]:
    """The JSON object in a description, and the text after it."""
    value, end = json.JSONDecoder().raw_decode(text, text.index("{"))
    return value, text[end:]


def test_a_description_has_the_schema_and_is_one_line():
    text = describe_function("Finds\npassages.", SEARCH)
    about = {"properties": SEARCH["properties"], "required": ["query"]}
    assert text.startswith("Finds passages. Arguments: a JSON object, {")
    assert shown(text) == (about, " The text of query alone will do.")
    assert describe_function("", ADD).startswith("Arguments: ")
    in_other_scripts = {"properties": {"город": {"type": "string", "description": "都市の名前 \u2028 ü"}}}
    text = describe_function("Погода.", in_other_scripts)
    assert text.startswith("Погода.") and '"город": {"type": "string", "description": "都市の名前 ü"}' in text


def test_a_long_description_is_cut_between_properties():
    names = [f"argument_{i}" for i in range(1000)]
    text = describe_function("a " * 10_000, schema(["argument_999"], **dict.fromkeys(names, "string")))
    about, rest = shown(text)
    assert len(text) < 6500 and "\n" not in text
    assert about["required"] == ["argument_999"]
    assert list(about["properties"]) == [*names[: len(about["properties"]) - 1], "argument_999"]
    assert rest.startswith(f" More arguments: {names[len(about['properties']) - 1]}, ")
    choices = {"enum": [f"choice {i}" for i in range(1000)]}
    about, rest = shown(describe_function("", {"properties": {"choice": choices, "n": {"type": "integer"}}}))
    assert (about["properties"], rest) == ({"n": {"type": "integer"}}, " More arguments: choice.")


def test_references_are_replaced_by_the_definitions():
    city = {"type": "object", "properties": {"name": {"type": "string"}, "near": {"$ref": "#/$defs/City"}}}
    schema = {
        "properties": {"to": {"$ref": "#/$defs/City", "description": "Target."}, "a/b": {"$ref": "#/$defs/a~1b"}},
        "required": ["a/b"],
        "$defs": {"City": city, "a/b": {"type": "string"}},
    }
    about, rest = shown(describe_function("", schema))
    near = {"type": "object", "properties": {"name": {"type": "string"}, "near": {}}}
    assert about["properties"] == {"to": {**near, "description": "Target."}, "a/b": {"type": "string"}}
    assert rest == " The text of a/b alone will do." and call_arguments(schema, "Oslo") == {"a/b": "Oslo"}


def test_references_without_end_are_bounded():
    doubling = {f"D{i}": {"properties": {side: {"$ref": f"#/$defs/D{i + 1}"} for side in "ab"}} for i in range(40)}
    text = describe_function("", {"properties": {"top": {"$ref": "#/$defs/D0"}}, "$defs": doubling})
    assert len(text) < 5000 and "$ref" not in text and list(shown(text)[0]["properties"]) == ["top"]
    elsewhere = {"properties": {"x": {"$ref": "https://a.org/x.json"}, "y": {"$ref": "#/$defs/none"}}}
    assert shown(describe_function("", elsewhere))[0]["properties"] == {"x": {}, "y": {}}
