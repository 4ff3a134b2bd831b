"""Environments that answer the model during a response.

environment.none     a response is one turn, which ends with an end token
environment.tools    a turn ends with a closing tag, such as </search>; the tool's result follows as token ids
environment.chat     a turn ends with an end token; what its calls return follows as messages (chat/environment.py)

A state is a value: `answer` is a function of a state and a turn, and changes nothing that another branch can see. For
environments whose states are not values, `StatefulEnvironment` (stateful.py) keeps this promise.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Any, NamedTuple

from verl.workers.rollout.tools.plain_text import one_line
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall

MALFORMED = "malformed"  # error kind of a call that did not reach its tool
DESCRIPTION = (
    "You can call the tools below. Write a call as <tag>arguments</tag>, with the tag of the tool; what it returns "
    "follows between <result> and </result>."
)
FAULT_CHARACTERS = 300  # largest number of characters kept of a tool's report of its own fault


class Ends(Enum):
    """What ends with a token of the model: nothing, its turn, which the environment answers, or the trajectory."""

    NO = "no"
    TURN = "turn"
    TRAJECTORY = "trajectory"


class TurnEnd(NamedTuple):
    """What ends first in the model's tokens, and the number of tokens up to there; all tokens if nothing ends."""

    ends: Ends
    n_tokens: int


@dataclass(frozen=True)
class Answer:
    """The environment's answer to a turn.

    Args:
        tokens: token ids that follow the turn; none if the trajectory is done, or if not even an empty answer fits.
        calls: descriptions of the calls that it answers, in JSON's types, for metrics and the viewer.
        state: state after the turn; None for an environment without state. It must not change.
        done: whether the trajectory ends with the turn.
        reward: reward of the turn; None for 0. It counts if the environment `gives_rewards`.
    """

    tokens: list[int]
    calls: tuple[dict[str, Any], ...] = ()
    state: Any = None
    done: bool = False
    reward: float | None = None


class BranchLost(RuntimeError):
    """The environment could not bring a branch back to its state; the trajectory is left out. The message says why."""


class Environment:
    """The environment of `environment=none`, which never answers."""

    call_limit = 0
    # text for every prompt's system message
    description = ""
    # the tools' JSON schemas for the chat template; None if the template gets none
    schemas: list[dict[str, Any]] | None = None
    # whether its rewards are those of the trajectories; else the reward loop scores them
    gives_rewards = False
    # tokens that end a continuation, in addition to the model's end tokens
    stop_token_ids: Sequence[int] = ()

    def open(self, row: Mapping[str, Any], seed: int) -> "Environment":
        """Return the environment of one prompt.

        Args:
            row: row of the data set.
            seed: seed of the prompt, equal for all its branches.

        Raises:
            ValueError: the row asks for something that the environment does not have; names the key.
        """
        return self

    async def close(self) -> None:
        """Close what this prompt's environment has opened. Nothing is answered afterwards."""

    def stops(self, turn: Sequence[int]) -> list[str]:
        """Return the texts that end a continuation of a turn, given the turn's tokens so far."""
        return []

    def ends(self, turn: Sequence[int], end_tokens: Container[int]) -> TurnEnd:
        """Return what ends first in a turn, and where.

        Args:
            turn: tokens of the model since the environment's last answer.
            end_tokens: tokens with which the model ends a response.
        """
        ended = bool(turn) and turn[-1] in end_tokens
        return TurnEnd(Ends.TRAJECTORY if ended else Ends.NO, len(turn))

    async def is_final(self, turn: Sequence[int]) -> bool:
        """Return whether a turn that has ended asks for no answer, so that the trajectory is complete without one."""
        return False

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

    async def answer(self, state: Any, turn: Sequence[int], max_tokens: int) -> Answer:
        """Return the answer to a turn that has ended (`Ends.TURN`). It changes no state that another branch can see.

        Args:
            state: state before the turn, from the answer before it; None for the prompt's first state.
            turn: tokens of the turn.
            max_tokens: largest number of tokens of the answer.

        Raises:
            BranchLost: the state cannot be reached again.
        """
        raise NotImplementedError

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        """Return metrics of a prompt, given the descriptions of its calls; a call that several trajectories share
        counts once."""
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

    def ends(self, turn: Sequence[int], end_tokens: Container[int]) -> TurnEnd:
        call = self.protocol.first_call(turn) if turn else None
        return super().ends(turn, end_tokens) if call is None else TurnEnd(Ends.TURN, call[0])

    async def answer(self, state: Any, turn: Sequence[int], max_tokens: int) -> Answer:
        tag, content = self.protocol.call(turn)
        if content is None:
            call = ToolCall(tag, f"Error: {tag} was closed but not opened", ok=False, seconds=0.0, error=MALFORMED)
        else:
            call = await self.tools.call(tag, content)
        tokens = self.protocol.result_ids(call.text, min(self.max_result_tokens, max_tokens))
        return Answer(tokens, (description_of(call),))

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        return call_metrics(calls)


def description_of(call: ToolCall) -> dict[str, Any]:
    """Return the description of a call for metrics and the viewer, in JSON's types."""
    about = {"tool": call.tool, "ok": call.ok, "seconds": round(call.seconds, 4)}
    about |= {name: getattr(call, name) for name in ("cached", "retries", "restarts", "error") if getattr(call, name)}
    return about | ({"fault": one_line(call.text, FAULT_CHARACTERS)} if call.own_fault else {})


def call_metrics(calls: Sequence[dict]) -> dict[str, float]:
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
