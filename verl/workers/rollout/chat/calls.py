"""Reads the calls of a turn with verl's parsers, which `multi_turn.format` names.

A parser of verl drops a call that it cannot read. Here such a call is kept with its fault, so that the model reads
what was wrong: `CallReader` compares the parser's calls with the marks of calls in the turn's text.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

logger = logging.getLogger(__name__)

FORMAT = "actor_rollout_ref.rollout.multi_turn.format"
PYTHON_TAG = "<|python_tag|>"
UNREADABLE = "the call cannot be read"
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", re.DOTALL)
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


def json_call(body: str) -> Call:
    """Return the call that a JSON text holds, also in a Markdown fence: {"name": …, "arguments": {…}}.

    Llama's word for the arguments, `parameters`, is read too.
    """
    fenced = _FENCE.fullmatch(body)
    try:
        call = json.loads(fenced[1] if fenced else body)
    except (ValueError, RecursionError) as error:
        return Call("", fault=f"the call is no JSON ({error})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call("", fault='the call is no JSON object with a "name"')
    key = next((key for key in ("arguments", "parameters") if key in call), None)
    if key is None:
        return Call(call["name"], fault="the call has no arguments")
    return Call(call["name"], json.dumps(call[key], ensure_ascii=False))


def hermes_calls(text: str) -> list[Call]:
    """Return the calls between <tool_call> and </tool_call>, broken ones too."""
    calls = []
    for part in text.split("<tool_call>")[1:]:
        body, closed, _ = part.partition("</tool_call>")
        calls.append(json_call(body) if closed else Call("", fault="the call does not end with </tool_call>"))
    if not calls and "</tool_call>" in text:
        return [Call("", fault="the call does not begin with <tool_call>")]
    return calls


def llama_calls(text: str) -> list[Call]:
    """Return the call that a turn of Llama 3.1 consists of, perhaps a broken one; none if the turn is no call.

    A turn holds one call, since the template renders one call a message: what follows the first one is left out.
    """
    _, tag, body = text.rpartition(PYTHON_TAG)
    body = body.strip()
    keys = '"name"' in body and ('"parameters"' in body or '"arguments"' in body)
    if not tag and not (body.startswith("{") and keys):
        return []
    with suppress(ValueError, RecursionError):
        body = body[: json.JSONDecoder().raw_decode(body)[1]]
    return [json_call(body)]


# format whose calls are JSON -> function that returns a turn's calls, broken ones too
JSON_CALLS: dict[str, Callable[[str], list[Call]]] = {"hermes": hermes_calls, "llama3_json": llama_calls}


@ToolParser.register("llama3_json")
class Llama3JsonParser(ToolParser):
    """The parser of Llama 3.1's calls, {"name": …, "parameters": {…}}, which may follow <|python_tag|>."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=False)
        calls = [call for call in llama_calls(text) if not call.fault]
        return "" if calls else text, [FunctionCall(name=call.name, arguments=call.arguments) for call in calls]


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
        # texts that a turn with a call holds: verl's parsers have them as attributes, but for gpt-oss
        names = [name for name in vars(self.parser) if "tool_call" in name and name.endswith("_token")]
        self.marks = [getattr(self.parser, name) for name in names] or [" to=functions."] * (format == "gpt-oss")
        # the prompt ends with the beginning of the message, without which this parser sees no call
        begins = "<|start|>assistant" if format == "gpt-oss" else ""
        self._begins = tokenizer.encode(begins, add_special_tokens=False)
        self._logged: set[str] = set()

    async def read(self, turn: Sequence[int], tools: list[OpenAIFunctionToolSchema]) -> list[Call]:
        """Return the calls of a turn in order, also those that cannot be read; none if the turn is a final answer."""
        parsed = await self._parsed([*self._begins, *turn], tools)
        calls = [Call(call.name, call.arguments, call.tool_call_id) for call in parsed]
        text = without_thoughts(self.tokenizer.decode(list(turn), skip_special_tokens=False))
        with_broken = JSON_CALLS[self.format](text) if self.format in JSON_CALLS else []
        if len(with_broken) > len(calls):
            return with_broken
        if not calls and any(mark in text for mark in self.marks):
            return [Call("", fault=UNREADABLE)]
        return calls

    async def message(
        self, turn: Sequence[int], tools: list[OpenAIFunctionToolSchema]
    ) -> tuple[str, list[FunctionCall]]:
        """Return a turn as a server would: its text, with special tokens, and the calls that can be read."""
        try:
            return await self.parser.extract_tool_calls([*self._begins, *turn], tools)
        except Exception as error:
            self._log(error)
            return self.tokenizer.decode(list(turn), skip_special_tokens=False), []

    async def _parsed(self, token_ids: list[int], tools: list[OpenAIFunctionToolSchema]) -> list[FunctionCall]:
        """Return the parser's calls; none if it fails, since the model's text must not end a run."""
        try:
            return (await self.parser.extract_tool_calls(token_ids, tools))[1]
        except Exception as error:
            self._log(error)
            return []

    def _log(self, error: Exception) -> None:
        if type(error).__name__ not in self._logged:
            self._logged.add(type(error).__name__)
            logger.warning(f"{FORMAT}={self.format} failed on a turn; later ones are not logged", exc_info=error)
