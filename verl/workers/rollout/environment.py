"""Environments that answer the model during a response: none, or tools.

environment.none     a response is one turn, which ends with an end token
environment.tools    a turn ends with a closing tag, such as </search>; the tool's result follows as token ids
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from verl.workers.rollout.tools.plain_text import one_line
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall

MALFORMED = "malformed"  # error kind of a call that did not reach its tool
DESCRIPTION = (
    "You can call the tools below. Write a call as <tag>arguments</tag>, with the tag of the tool; what it returns "
    "follows between <result> and </result>."
)
FAULT_CHARACTERS = 300  # largest number of characters kept of a tool's report of its own fault


class Environment:
    """The environment of `environment=none`, which never answers."""

    call_limit = 0
    # text for every prompt's system message
    description = ""

    def stops(self, turn: Sequence[int]) -> list[str]:
        """Return the texts that end a continuation of a turn, given the turn's tokens so far."""
        return []

    def first_call(self, turn: Sequence[int]) -> tuple[int, str] | None:
        """Return the first call in a turn as (number of tokens up to the call's end, its tool's tag, such as `search`);
        None if there is none."""
        return None

    def prompt_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a prompt's messages, with `description` at the end of the system message, which is made if missing."""
        if not self.description:
            return list(messages)
        system: Mapping[str, Any] = {"role": "system", "content": ""}
        others = list(messages)
        if others and others[0]["role"] == "system":
            system, *others = others
        if not isinstance(system["content"], str):
            raise ValueError("describe_in_prompt=true: expected a text as content of the prompt's system message")
        return [{**system, "content": f"{system['content']}\n\n{self.description}".strip()}, *others]

    async def answer(self, turn: Sequence[int], tag: str, max_tokens: int) -> tuple[list[int], dict]:
        """Return the answer to a turn that ends with a call, at most `max_tokens` token ids and none if not even an
        empty answer fits, and a description of the call in JSON's types."""
        raise NotImplementedError

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        """Return metrics of a prompt's calls, given their descriptions from `answer`; a call that several trajectories
        share counts once."""
        return {}


NO_ENVIRONMENT = Environment()


class Tools(Environment):
    """The environment of `environment=tools`.

    Args:
        call_limit: largest number of calls of a trajectory, which a further call ends; None for the config's.
    """

    def __init__(self, tools: ToolBox, protocol: Protocol, call_limit: int | None = None):
        self.tools, self.protocol = tools, protocol
        self.call_limit = tools.config.call_limit if call_limit is None else call_limit
        self.max_result_tokens = tools.config.max_result_tokens
        self.description = self._description() if tools.config.describe_in_prompt else ""

    def _description(self) -> str:
        """Return the text that a prompt's system message gets with `describe_in_prompt`. Descriptions are text from
        outside, as results are."""
        described = {tag: tool.description for tag, tool in self.tools.tools.items() if tool.description}
        if not described:
            raise ValueError(
                "actor_rollout_ref.rollout.tools.describe_in_prompt=true: none of the tools "
                f"{', '.join(self.tools.tools)} describes itself; set it to false, and let the data's prompts name them"
            )
        lines = [f"- <{tag}>: {self.protocol.harmless(text)}" for tag, text in described.items()]
        return "\n".join([DESCRIPTION, *lines])

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
        info |= {
            name: getattr(call, name) for name in ("cached", "retries", "restarts", "error") if getattr(call, name)
        }
        info |= {"fault": one_line(call.text, FAULT_CHARACTERS)} if call.own_fault else {}
        return self.protocol.result_ids(call.text, min(self.max_result_tokens, max_tokens)), info

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        """Return the numbers of calls and failures; for each tool also the numbers of its own faults, malformed calls,
        retries, restarts and cache hits, and the mean seconds of a call."""
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
