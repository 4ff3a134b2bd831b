"""The environment of `environment=tools`: a turn ends with a closing tag, and the tool's result follows."""

import copy
from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from verl.workers.rollout.environment import Answer, Ends, Environment, TurnEnd
from verl.workers.rollout.stateful import InstanceKeys, InstancePool
from verl.workers.rollout.tools.plain_text import one_line
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.sessions import ToolSessions, ToolStates
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall

MALFORMED = "malformed"  # error kind of a call that did not reach its tool
DESCRIPTION = (
    "You can call the tools below. Write a call as <tag>arguments</tag>, with the tag of the tool; what it returns "
    "follows between <result> and </result>."
)
MAX_FAULT_CHARS = 300  # largest number of characters kept of a tool's report of its own fault


class Tools(Environment):
    """The environment of `environment=tools`; `pool` holds the live sessions of the worker's tools."""

    def __init__(self, tools: ToolBox, protocol: Protocol, pool: InstancePool | None = None):
        self.tools, self.protocol, self.pool = tools, protocol, pool or InstancePool(InstanceKeys())
        self.sessions = ToolSessions(tools, self.pool)
        self.call_limit = tools.config.call_limit
        self.max_result_tokens = tools.config.max_result_tokens
        self.description = self._description(tools.tools) if tools.config.describe_in_prompt else ""
        if tools.config.describe_in_prompt and not self.description:
            raise ValueError(
                "actor_rollout_ref.rollout.tools.describe_in_prompt=true: none of the tools "
                f"{', '.join(self.tools.tools)} describes itself; set it to false, and let the data's prompts name them"
            )

    def open(self, row: Mapping[str, Any], seed: int) -> "Tools":
        """Return the environment with the tools that the row selects: of others, no tag ends a turn."""
        opened, selected = copy.copy(self), self.tools.selected_by(row)
        opened.sessions = ToolSessions(self.tools, self.pool)
        if len(selected) < len(self.tools.tools):
            opened.protocol = self.protocol.with_tools(selected)
            opened.description = self.description and self._description(selected)
        return opened

    async def close(self) -> None:
        await self.sessions.close()

    async def stop(self) -> None:
        await self.tools.close()

    def _description(self, tags: Iterable[str]) -> str:
        """Return the text that a prompt's system message gets with `describe_in_prompt`; empty if none of the tools
        describes itself. Descriptions are text from outside, as results are."""
        described = {tag: text for tag in tags if (text := self.tools.tools[tag].description)}
        lines = [f"- <{tag}>: {self.protocol.harmless(text)}" for tag, text in described.items()]
        return "\n".join([DESCRIPTION, *lines]) if lines else ""

    def stops(self, turn: Sequence[int]) -> list[str]:
        return self.protocol.stops(turn)

    def ends(self, turn: Sequence[int], end_tokens: Container[int]) -> TurnEnd:
        call = self.protocol.first_call(turn) if turn else None
        return super().ends(turn, end_tokens) if call is None else TurnEnd(Ends.TURN, call[0])

    async def answer(self, state: ToolStates | None, turn: Sequence[int], max_tokens: int) -> Answer:
        tag, content = self.protocol.call(turn)
        if content is None:
            call = ToolCall(tag, f"Error: {tag} was closed but not opened", ok=False, seconds=0.0, error=MALFORMED)
        else:
            call, state = await self.sessions.call(state, tag, content)
        tokens = self.protocol.result_ids(call.text, min(self.max_result_tokens, max_tokens))
        return Answer(tokens, (description_of(call),), state)

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        return call_metrics(calls) | self.sessions.metrics()


def description_of(call: ToolCall) -> dict[str, Any]:
    """Return the description of a call for metrics and the viewer, in JSON's types."""
    about = {"tool": call.tool, "ok": call.ok, "seconds": round(call.seconds, 4)}
    about |= {name: getattr(call, name) for name in ("cached", "retries", "restarts", "error") if getattr(call, name)}
    return about | ({"fault": one_line(call.text, MAX_FAULT_CHARS)} if call.own_fault else {})


def call_metrics(calls: Sequence[dict]) -> dict[str, float]:
    """Return the numbers of calls, failures and other events, and the mean seconds of a call, in all and by tool."""
    metrics: dict[str, float] = {"tool_calls": len(calls), "tool_failures": sum(not call["ok"] for call in calls)}
    for tool in sorted({call["tool"] for call in calls}):
        own_calls = [call for call in calls if call["tool"] == tool]
        metrics |= {
            f"tool_{tool}/calls": len(own_calls),
            f"tool_{tool}/failures": sum(not call["ok"] for call in own_calls),
            f"tool_{tool}/own_faults": sum("fault" in call for call in own_calls),
            f"tool_{tool}/malformed": sum(call.get("error") == MALFORMED for call in own_calls),
            f"tool_{tool}/retries": sum(call.get("retries", 0) for call in own_calls),
            f"tool_{tool}/restarts": sum(call.get("restarts", 0) for call in own_calls),
            f"tool_{tool}/cache_hits": sum(call.get("cached", False) for call in own_calls),
            f"tool_{tool}/seconds": fmean(call["seconds"] for call in own_calls),
        }
    return {name: float(value) for name, value in metrics.items()}
