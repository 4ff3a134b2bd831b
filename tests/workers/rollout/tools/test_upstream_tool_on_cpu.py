"""Tools written for upstream's agent loops, in our tool box."""

import asyncio

import pytest
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from tests.tables import table
from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig


def schema(name: str, required=("query",), **types) -> dict:
    properties = {key: {"type": kind, "description": key} for key, kind in (types or {"query": "string"}).items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


class Shelf(BaseTool):
    """Knows what it was asked, and by which instance; makes its own schema."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.live, self.asked, self.released = set(), [], 0

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(schema("search"))

    async def create(self, instance_id=None, **kwargs):
        instance, response = await super().create(instance_id, **kwargs)
        self.live.add(instance)
        return instance, response

    async def execute(self, instance_id, parameters, **kwargs):
        assert instance_id in self.live
        self.asked.append(parameters)
        query = parameters["query"]
        if query == "slow":
            await asyncio.sleep(60)
        if query == "bad":
            raise LookupError("no such\nbook")
        if query == "picture":
            return ToolResponse(image=[b"x"]), 0.0, {}
        if query == "nothing":
            return ToolResponse(), 0.0, {}
        return ToolResponse(text=f"{self.config.get('prefix', '')}{query}"), 1.0, {"n": 1}

    async def release(self, instance_id, **kwargs):
        self.live.remove(instance_id)
        self.released += 1


def box(class_path=f"{__name__}.Shelf", params=None, **config) -> ToolBox:
    entry = {"class_path": class_path, "params": params or {}}
    return ToolBox(ToolsConfig(tool_instances={"any": entry}, **config))


def call(made: ToolBox, content: str, tag="search"):
    return asyncio.run(made.call(tag, content))


def test_json_arguments_and_the_plain_text_of_a_single_string():
    made = box(params={"config": {"prefix": "about "}})
    assert list(made.tools) == ["search"]
    replies = [call(made, text) for text in ('{"query": "Paris"}', "Paris")]
    assert all(reply.ok and reply.tool == "search" and reply.text == "about Paris" for reply in replies)
    shelf = made.tools["search"].tool
    assert shelf.asked == [{"query": "Paris"}] * 2 and shelf.released == 2 and not shelf.live


def test_failures_are_told_and_every_instance_is_released():
    made = box(timeout=0.1, retry_count=0)
    replies = {query: call(made, query) for query in ("bad", "slow", "picture", "nothing")}
    results = {query: (reply.ok, reply.text, reply.error) for query, reply in replies.items()}
    assert results == {
        "bad": (False, "Error: search failed: no such book", "LookupError"),
        "slow": (False, "Error: search gave no answer in 0.1 seconds", "timeout"),
        "picture": (False, "Error: search returned no text", "no_text"),
        "nothing": (True, "", None),
    }
    assert made.tools["search"].tool.released == 4


def test_upstreams_own_base_tool():
    number = schema("count", (), n="integer")
    made = box("verl.tools.base_tool.BaseTool", {"config": {"type": "native"}, "tool_schema": number})
    reply = call(made, '{"n": 3}', "count")
    assert reply.ok and reply.text == "Updated the tool state."
    assert made.tools["count"].tool.config == {"type": "native"}


@pytest.mark.parametrize(("class_path", "params", "message"), table(__file__, "wrong settings"))
def test_wrong_settings_name_their_key_before_a_run(class_path, params, message):
    with pytest.raises(ValueError, match=message):
        ToolsConfig(tool_instances={"any": {"class_path": class_path, "params": params}})


def double(number: int, times: int = 1) -> int:
    """Doubles a number.

    Args:
        number: Any number.
        times: How often.
    """
    if number < 0:
        raise ToolError("Expected no negative number.", kind="negative", retry=False)
    return number * 2**times


async def spell(word: str) -> str:
    """Spells a word.

    Args:
        word: Any word.
    """
    if not word.isalpha():
        raise LookupError("no word")
    return "-".join(word)


def undescribed(word):
    return word


def test_a_function_is_a_tool():
    made = box(f"{__name__}.double")
    assert made.tools["double"].schema["required"] == ["number"]
    assert call(made, '{"number": 3, "times": 2}', "double").text == "12"
    assert call(made, '{"times": 2}', "double").text == "Error: Missing arguments: number."
    wrong = [call(made, text, "double") for text in ('{"number": "two"}', '{"number": 1, "n": 2}')]
    assert [(each.text, each.error, each.own_fault) for each in wrong] == [
        ("Error: the argument number of double is no integer", "bad_arguments", False),
        ("Error: double has no argument n; its arguments are number, times", "bad_arguments", False),
    ]
    refused = call(made, '{"number": -1}', "double")
    assert refused.text == "Error: Expected no negative number."
    assert (refused.error, refused.own_fault) == ("negative", False)
    made = box(f"{__name__}.spell")
    assert call(made, "otter", "spell").text == "o-t-t-e-r"
    assert call(made, "3", "spell").text == "Error: spell failed: no word"
    with pytest.raises(ValueError, match="tool_instances.any: undescribed does not describe itself as a tool: "):
        box(f"{__name__}.undescribed")
    with pytest.raises(ValueError, match="params: .*unexpected keyword"):
        box(f"{__name__}.spell", {"sides": 3})
