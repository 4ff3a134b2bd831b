"""Environments that answer the model during a response: none, or tools.

environment.none     a response is one turn, which ends with an end token
environment.tools    a turn ends with a closing tag, such as </search>; the tool's result follows as token ids
"""

from collections.abc import Sequence
from statistics import fmean

from verl.workers.rollout.tools.plain_text import one_line
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall

MALFORMED = "malformed"  # error kind of a call that did not reach its tool
FAULT_CHARACTERS = 300  # largest number of characters kept of a tool's report of its own fault


class Environment:
    """The environment of `environment=none`, which never answers."""

    call_limit = 0

    def stops(self, turn: Sequence[int]) -> list[str]:
        """Return the texts that end a continuation of a turn, given the turn's tokens so far."""
        return []

    def first_call(self, turn: Sequence[int]) -> tuple[int, str] | None:
        """Return the first call in a turn, (number of tokens up to the call's end, its tag); None if there is none."""
        return None

    async def answer(self, turn: Sequence[int], tag: str, max_tokens: int) -> tuple[list[int], dict]:
        """Return the answer to a turn that ends with a call, at most `max_tokens` token ids and none if not even an
        empty answer fits, and a description of the call in JSON's types."""
        raise NotImplementedError

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        """Return metrics of a prompt's calls, given their descriptions from `answer`; a shared call counts once."""
        return {}


NO_ENVIRONMENT = Environment()


class Tools(Environment):
    """The environment of `environment=tools`; a call beyond `call_limit` (None for the config's) ends a trajectory."""

    def __init__(self, tools: ToolBox, protocol: Protocol, call_limit: int | None = None):
        self.tools, self.protocol = tools, protocol
        self.call_limit = tools.config.call_limit if call_limit is None else call_limit
        self.max_result_tokens = tools.config.max_result_tokens

    def stops(self, turn: Sequence[int]) -> list[str]:
        return self.protocol.stops(turn)

    def first_call(self, turn: Sequence[int]) -> tuple[int, str] | None:
        return self.protocol.first_call(turn) if turn else None

    async def answer(self, turn: Sequence[int], tag: str, max_tokens: int) -> tuple[list[int], dict]:
        content = self.protocol.content(turn, tag)
        if content is None:
            call = ToolCall(tag, f"Error: {tag} was closed but not opened", ok=False, seconds=0.0, error=MALFORMED)
        else:
            call = await self.tools.call(tag, content)
        info = {"tool": call.tool, "ok": call.ok, "seconds": round(call.seconds, 4)}
        info |= {name: getattr(call, name) for name in ("cached", "retries", "error") if getattr(call, name)}
        info |= {"fault": one_line(call.text, FAULT_CHARACTERS)} if call.own_fault else {}
        return self.protocol.result_ids(call.text, min(self.max_result_tokens, max_tokens)), info

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        """Return the numbers of calls and failures, and by tool also faults, retries, cache hits, and mean seconds."""
        metrics: dict[str, float] = {"tool_calls": len(calls), "tool_failures": sum(not call["ok"] for call in calls)}
        for tool in sorted({call["tool"] for call in calls}):
            own_calls = [call for call in calls if call["tool"] == tool]
            metrics |= {
                f"tool_{tool}/calls": len(own_calls),
                f"tool_{tool}/failures": sum(not call["ok"] for call in own_calls),
                f"tool_{tool}/own_faults": sum("fault" in call for call in own_calls),
                f"tool_{tool}/malformed": sum(call.get("error") == MALFORMED for call in own_calls),
                f"tool_{tool}/retries": sum(call.get("retries", 0) for call in own_calls),
                f"tool_{tool}/cache_hits": sum(call.get("cached", False) for call in own_calls),
                f"tool_{tool}/seconds": fmean(call["seconds"] for call in own_calls),
            }
        return {name: float(value) for name, value in metrics.items()}
