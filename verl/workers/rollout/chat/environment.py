"""The environment of `environment=chat`: the model calls tools as its chat template says, and reads tool messages.

    turn ── CallReader ──> calls ── arguments_of ──> ToolBox ──> texts ── ChatTemplate ──> tokens of the answer

A turn without a call is the final answer. A call that cannot run is answered with its fault.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.workers.rollout.chat.calls import Call, CallFault, CallReader, arguments_of, schema_for_parser
from verl.workers.rollout.chat.template import UNKNOWN, ChatTemplate
from verl.workers.rollout.environment import Answer, BranchLost, Ends
from verl.workers.rollout.stateful import InstancePool
from verl.workers.rollout.tools.environment import MALFORMED, ToolEnvironment, ToolStates, description_of
from verl.workers.rollout.tools.plain_text import PROTOCOL_TAGS, neutral, one_line
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall

MAX_NAME_CHARS = 64  # largest number of characters kept of a tool's name that the model made up


def call_limit(max_calls: int, multi_turn) -> int:
    """Return the largest number of answers in a trajectory: `tools.call_limit`, and less by verl's keys
    `max_user_turns` and `max_assistant_turns`, of which null or 0 is no limit."""
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


def result_text(template: ChatTemplate, text: str) -> str:
    """Return a tool's text without control tokens, and without tags by which rewards find an answer."""
    return neutral(template.control_tokens.harmless(text), PROTOCOL_TAGS)


class Chat(ToolEnvironment):
    """The environment of `environment=chat`, of all tools or of those that a row selects (`names`). `multi_turn` is
    verl's section of that name."""

    token_end = Ends.TURN

    def __init__(
        self,
        tools: ToolBox,
        reader: CallReader,
        template: ChatTemplate,
        multi_turn,
        pool: InstancePool | None = None,
        names: Iterable[str] | None = None,
    ):
        super().__init__(tools, pool)
        self.reader, self.template, self.multi_turn = reader, template, multi_turn
        self.selected = {name: tools.tools[name] for name in (tools.tools if names is None else names)}
        functions = [tool.function() for tool in self.selected.values()]
        self.schemas: list[dict[str, Any]] = [self._harmless(function) for function in functions]
        self._parser_schemas = [schema_for_parser(function) for function in functions]
        self.stop_token_ids = reader.stop_token_ids
        self.call_limit = call_limit(tools.config.call_limit, multi_turn)
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
        """Return the environment with the tools that a row selects (`ToolBox.selected_by`)."""
        names = self.tools.selected_by(row)
        return Chat(self.tools, self.reader, self.template, self.multi_turn, self.pool, names)

    async def is_final(self, turn: Sequence[int]) -> bool:
        return not await self.reader.read(turn, self._parser_schemas)

    async def answer(self, state: ToolStates | None, turn: Sequence[int], max_tokens: int) -> Answer:
        calls = (await self.reader.read(turn, self._parser_schemas))[: self.multi_turn.max_parallel_calls]
        if not calls:
            return Answer([], done=True)
        done, state = await self._run(calls, state)
        shown = [self._shown(call) for call in calls]
        try:
            tokens = self.template.answer(turn, shown, [call.text for call in done], self.schemas)
        except Exception as error:  # a template may raise anything, and must not end the run
            raise BranchLost(f"the chat template does not render a tool's answer: {error}") from error
        return Answer(tokens if len(tokens) <= max_tokens else [], tuple(map(description_of, done)), state)

    def _shown(self, call: Call) -> Call:
        """Return a call whose name and id, which the model may have made up, have no control tokens."""
        name = call.name if call.name in self.selected else self._harmless(one_line(call.name, MAX_NAME_CHARS))
        return replace(call, name=name, id=self._harmless(call.id))

    async def _run(self, calls: Sequence[Call], state: ToolStates | None) -> tuple[list[ToolCall], ToolStates | None]:
        """Return the outcomes of calls, and the sessions' states after them; a call with a fault does not run."""
        outcomes: dict[int, ToolCall] = {}
        contents: dict[int, tuple[str, str]] = {}
        for i, call in enumerate(calls):
            try:
                tool, arguments = arguments_of(call, self.selected)
                contents[i] = tool.trigger_tag, tool.content_of(arguments)
            except CallFault as fault:
                outcomes[i] = self._refused(call, str(fault))
        done, state = await self.sessions.call_all(state, list(contents.values()))
        limit, side = self.multi_turn.max_tool_response_length, self.multi_turn.tool_response_truncate_side
        shown = [replace(call, text=result_text(self.template, cut(call.text, limit, side))) for call in done]
        outcomes |= dict(zip(contents, shown, strict=True))
        return [outcomes[i] for i in range(len(calls))], state

    def _refused(self, call: Call, fault: str) -> ToolCall:
        """Return the outcome of a call with a fault, which the model reads."""
        name = self.selected[call.name].name if call.name in self.selected else UNKNOWN
        return ToolCall(name, f"Error: {self._harmless(fault)}.", ok=False, seconds=0.0, error=MALFORMED)
