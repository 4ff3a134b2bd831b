"""Reads the calls of a turn with verl's parsers, which `multi_turn.format` names, and checks their arguments.

A parser of verl drops a call that it cannot read. A turn with the mark of a call, of which none can be read, is here a
call with a fault, so that the model reads of it.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl.workers.rollout.tools.base_tool import BaseTool
from verl.workers.rollout.tools.function_calls import MAX_SHOWN_CHARS, TYPES, wrong_argument
from verl.workers.rollout.tools.plain_text import one_line

logger = logging.getLogger(__name__)

FORMAT = "actor_rollout_ref.rollout.multi_turn.format"
PYTHON_TAG = "<|python_tag|>"
MARKS = {"gpt-oss": [" to=functions."], "llama3_json": [PYTHON_TAG]}  # marks of a call, for parsers that name none
UNREADABLE = "the call cannot be read"
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|$)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it; `arguments` should be a JSON object, and `name` is empty if it cannot be read."""

    name: str
    arguments: str = "{}"
    id: str | None = None
    fault: str = ""


def without_thoughts(text: str) -> str:
    """Return a turn's text behind its thoughts, which may name the marks of a call."""
    return _ANALYSIS.sub("", text.rpartition("</think>")[2])


@ToolParser.register("llama3_json")
class Llama3JsonParser(ToolParser):
    """The parser of Llama 3.1's calls, {"name": …, "parameters": {…}}, which may follow <|python_tag|>.

    A turn holds one call, since the template renders one call a message: what follows the first one is left out.
    """

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=False)
        try:
            call, _ = json.JSONDecoder().raw_decode(text.rpartition(PYTHON_TAG)[2].strip())
            key = "parameters" if "parameters" in call else "arguments"
            return "", [FunctionCall(name=call["name"], arguments=json.dumps(call[key], ensure_ascii=False))]
        except (ValueError, RecursionError, KeyError, TypeError):  # the turn is no such call
            return text, []


def check_format(name: str) -> None:
    """Raise ValueError if there is no parser of this name; the message lists those that there are."""
    if name not in (names := sorted(ToolParser._registry)):
        raise ValueError(f"{FORMAT}={name}: expected one of {', '.join(names)}")


class CallReader:
    """Reads the calls of a turn with verl's parser `format`. As verl's parsers do, it also takes a call within the
    turn's thoughts. Raise ValueError for a tokenizer that lacks a token at which the parser's turns end."""

    def __init__(self, format: str, tokenizer):
        check_format(format)
        self.format, self.tokenizer = format, tokenizer
        self.parser = ToolParser.get_tool_parser(format, tokenizer)
        self.stop_token_ids = list(self.parser.stop_token_ids)
        if {None, tokenizer.unk_token_id} & {*self.stop_token_ids}:
            raise ValueError(f"{FORMAT}={format}: the tokenizer lacks the token at which such a call ends")
        # texts that a turn with a call holds: most parsers have them as attributes
        names = [name for name in vars(self.parser) if "tool_call" in name and name.endswith("_token")]
        self.marks = [getattr(self.parser, name) for name in names] or MARKS.get(format, [])
        # the prompt ends with the beginning of the message, without which this parser sees no call
        begins = "<|start|>assistant" if format == "gpt-oss" else ""
        self._begins = tokenizer.encode(begins, add_special_tokens=False)
        self._logged: set[str] = set()

    async def read(self, turn: Sequence[int], tools: list[OpenAIFunctionToolSchema]) -> list[Call]:
        """Return the calls of a turn in order, or one with a fault if none can be read; none if the turn is a final
        answer."""
        _, parsed = await self.message(turn, tools)
        calls = [Call(call.name, call.arguments, call.tool_call_id) for call in parsed]
        text = without_thoughts(self.tokenizer.decode(list(turn), skip_special_tokens=False))
        if not calls and any(mark in text for mark in self.marks):
            return [Call("", fault=UNREADABLE)]
        return calls

    async def message(
        self, turn: Sequence[int], tools: list[OpenAIFunctionToolSchema]
    ) -> tuple[str, list[FunctionCall]]:
        """Return a turn's text with special tokens, and the calls that can be read; none if the parser fails."""
        try:
            return await self.parser.extract_tool_calls([*self._begins, *turn], tools)
        except Exception as error:
            if type(error).__name__ not in self._logged:
                self._logged.add(type(error).__name__)
                logger.warning(f"{FORMAT}={self.format} failed on a turn; later ones are not logged", exc_info=error)
            return self.tokenizer.decode(list(turn), skip_special_tokens=False), []


class CallFault(ValueError):
    """A call that cannot run. The model reads the message."""


def arguments_of(call: Call, tools: Mapping[str, BaseTool]) -> tuple[BaseTool, dict[str, Any]]:
    """Return a call's tool and arguments; raise CallFault if there is no such tool, or it does not allow these."""
    if call.fault:
        raise CallFault(call.fault)
    if call.name not in tools:
        raise CallFault(f"there is no tool {one_line(call.name, MAX_SHOWN_CHARS)}; the tools are {', '.join(tools)}")
    tool = tools[call.name]
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        raise CallFault(one_line(f"the arguments of {call.name} are no JSON ({error})", MAX_SHOWN_CHARS)) from error
    if not isinstance(arguments, dict):
        raise CallFault(f"the arguments of {call.name} are no JSON object")
    if fault := wrong_argument(call.name, tool.schema, arguments):
        raise CallFault(fault)
    return tool, arguments


def schema_for_parser(function: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
    """Return a function for verl's parsers, which read its arguments' types; `object` stands for other types."""
    about = function["function"]
    schema = about.get("parameters") or {}
    properties = {name: {"type": _type_of(value)} for name, value in (schema.get("properties") or {}).items()}
    parameters = {"type": "object", "properties": properties, "required": list(schema.get("required") or [])}
    described = {"name": about["name"], "description": about.get("description") or "", "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": described})


def _type_of(schema: Any) -> str:
    """Return the type of an argument; `object`, for any value, if its schema names not one type."""
    name = schema.get("type") if isinstance(schema, Mapping) else None
    return name if isinstance(name, str) and name in TYPES else "object"
