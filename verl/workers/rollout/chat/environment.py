"""The environment of `environment=chat`: the model calls tools as its chat template says, and reads tool messages.

    turn ── CallReader ──> calls ── arguments_of ──> ToolBox ──> texts ── ChatTemplate ──> tokens of the answer

A turn without a call is the final answer. A call that cannot run is answered with its fault and an example.
"""

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.tools.schemas import OpenAIFunctionToolSchema

from verl.workers.rollout.chat.arguments import CallFault, arguments_of, sample_arguments, schema_for_parser
from verl.workers.rollout.chat.calls import Call, CallReader
from verl.workers.rollout.chat.template import UNKNOWN, ChatTemplate
from verl.workers.rollout.environment import (
    MALFORMED,
    Answer,
    BranchLost,
    Ends,
    Environment,
    TurnEnd,
    call_metrics,
    description_of,
)
from verl.workers.rollout.tools.plain_text import one_line
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall

MAX_NAME_CHARS = 64  # largest number of characters kept of a tool's name that the model made up


def call_limit(max_calls: int, multi_turn) -> int:
    """Return the largest number of answers in a trajectory.

    Args:
        max_calls: the key `tools.call_limit`.
        multi_turn: verl's section, whose keys `max_user_turns` and `max_assistant_turns` also limit it; null or 0 for
            no limit.
    """
    limits = [max_calls]
    if multi_turn.max_user_turns:
        limits.append(multi_turn.max_user_turns)
    if multi_turn.max_assistant_turns:
        limits.append(multi_turn.max_assistant_turns - 1)
    return min(limits)


def cut(text: str, max_chars: int, side: str) -> str:
    """Return a text of at most `max_chars` characters and a note, as verl cuts it: at its left, right or middle.

    >>> cut("abcdef", 4, "middle")
    'ab...(truncated)...ef'
    """
    if len(text) <= max_chars:
        return text
    if side == "left":
        return "(truncated)..." + text[-max_chars:]
    if side == "right":
        return text[:max_chars] + "...(truncated)"
    half = max_chars // 2
    return text[:half] + "...(truncated)..." + text[-half:]


class Chat(Environment):
    """The environment of `environment=chat`, of all tools or of those that a row selects.

    Args:
        box: all tools of the process.
        multi_turn: verl's section `actor_rollout_ref.rollout.multi_turn`.
        names: names of the tools that the model may call; None for all.

    Raises:
        ValueError: the chat template does not describe the tools.
    """

    def __init__(
        self, box: ToolBox, reader: CallReader, template: ChatTemplate, multi_turn, names: Iterable[str] | None = None
    ):
        self.box, self.reader, self.template, self.multi_turn = box, reader, template, multi_turn
        self.tools = {name: box.tools[name] for name in (box.tools if names is None else names)}
        functions = [tool.function() for tool in self.tools.values()]
        self.schemas: list[dict[str, Any]] = [self._harmless(function) for function in functions]
        self._parser_schemas = [OpenAIFunctionToolSchema(**schema_for_parser(function)) for function in functions]
        self.stop_token_ids = reader.stop_token_ids
        self.call_limit = call_limit(box.config.call_limit, multi_turn)
        if names is None:
            template.check_tools(self.schemas)

    def _harmless(self, value: Any) -> Any:
        """Return a JSON value whose texts have no control tokens: a server's descriptions are text from outside."""
        if isinstance(value, str):
            return self.template.control_tokens.harmless(value)
        if isinstance(value, Mapping):
            return {self._harmless(key): self._harmless(item) for key, item in value.items()}
        return [self._harmless(item) for item in value] if isinstance(value, list | tuple) else value

    def open(self, row: Mapping[str, Any], seed: int) -> "Chat":
        """Return the environment with the tools that a row selects: `extra_info.tool_selection`, or a column `tools`.

        Raises:
            ValueError: the row names a tool that there is not.
        """
        key, names = "extra_info.tool_selection", (row.get("extra_info") or {}).get("tool_selection")
        if names is None:
            key, names = "tools", row.get("tools")
        if names is None or not len(names):
            return self
        selected = [names] if isinstance(names, str) else list(names)
        if unknown := [name for name in selected if not (isinstance(name, str) and name in self.box.tools)]:
            raise ValueError(
                f"row {row.get('index')}: {key} names {', '.join(map(str, unknown))}, and the tools of "
                f"actor_rollout_ref.rollout are {', '.join(self.box.tools)}"
            )
        return Chat(self.box, self.reader, self.template, self.multi_turn, selected)

    def ends(self, turn: Sequence[int], end_tokens: Container[int]) -> TurnEnd:
        ended = bool(turn) and (turn[-1] in end_tokens or turn[-1] in self.stop_token_ids)
        return TurnEnd(Ends.TURN if ended else Ends.NO, len(turn))

    async def is_final(self, turn: Sequence[int]) -> bool:
        return not await self.reader.read(turn, self._parser_schemas)

    async def answer(self, state: Any, turn: Sequence[int], max_tokens: int) -> Answer:
        calls = (await self.reader.read(turn, self._parser_schemas))[: self.multi_turn.max_parallel_calls]
        if not calls:
            return Answer([], done=True)
        done = await asyncio.gather(*(self._run(call) for call in calls))
        shown = [self._shown(call) for call in calls]
        try:
            tokens = self.template.answer(turn, shown, [call.text for call in done], self.schemas)
        except Exception as error:  # a template may raise anything, and must not end the run
            raise BranchLost(f"the chat template does not render a tool's answer: {error}") from error
        return Answer(tokens if len(tokens) <= max_tokens else [], tuple(map(description_of, done)))

    def _shown(self, call: Call) -> Call:
        """Return a call whose name and id, which the model may have made up, have no control tokens."""
        name = call.name if call.name in self.tools else self._harmless(one_line(call.name, MAX_NAME_CHARS))
        return replace(call, name=name, id=self._harmless(call.id))

    async def _run(self, call: Call) -> ToolCall:
        """Return the outcome of a call, whose text has no control tokens; a call with a fault does not run."""
        try:
            tool, arguments = arguments_of(call, self.tools)
        except CallFault as fault:
            return self._refused(call, str(fault))
        done = await self.box.call(tool.trigger_tag, tool.content_of(arguments))
        limit, side = self.multi_turn.max_tool_response_length, self.multi_turn.tool_response_truncate_side
        return replace(done, text=self._harmless(cut(done.text, limit, side)))

    def _refused(self, call: Call, fault: str) -> ToolCall:
        """Return the outcome of a call with a fault: the fault, and a call of the same tool as it should be."""
        tool = self.tools.get(call.name) or next(iter(self.tools.values()))
        example = self.template.example(tool.trigger_tag, sample_arguments(tool.schema))
        text = f"Error: {self._harmless(fault)}. A call looks like this:\n{example}"
        name = tool.name if call.name in self.tools else UNKNOWN
        return ToolCall(name, text, ok=False, seconds=0.0, error=MALFORMED)

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        return call_metrics(calls)
