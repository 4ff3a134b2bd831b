"""Environments that answer the model during a response.

environment.none     a response is one turn, which ends with an end token
environment.tools    a turn ends with a closing tag, such as </search>; the tool's result follows (tools/environment.py)
environment.chat     a turn ends with an end token; what its calls return follows as messages (chat/environment.py)
environment.gym      a turn is an action of anything with `reset` and `step`; observations follow (gym/environment.py)
environment.agent    a turn answers a request of a program, whose next one follows (agent/environment.py)

A state is a value: `answer` is a function of a state and a turn, and changes nothing that another branch can see. For
environments whose states are not values, `StatefulEnvironment` (stateful.py) keeps this promise.
"""

from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Ends(Enum):
    """The end that a token of the model makes: none, its turn's, which the environment answers, or the trajectory's."""

    NO = "no"
    TURN = "turn"
    TRAJECTORY = "trajectory"


class TurnEnd(NamedTuple):
    """The first end in the model's tokens, and the number of tokens up to it; all tokens if there is none."""

    ends: Ends
    n_tokens: int


@dataclass(frozen=True)
class Answer:
    """The environment's answer to a turn.

    Args:
        tokens: token ids that follow the turn; none if the trajectory is done, or if not even an empty answer fits.
        calls: descriptions of the calls that it answers, in JSON's types, for metrics and the viewer.
        state: state after the turn, hashable; None for an environment without state. It must not change.
        reward: reward of the turn; None if it has none (`Environment.counted_rewards`).
        context: all that the model reads before its next turn, if that is not the present context, the turn and
            `tokens`, which then only stand in the row.
    """

    tokens: list[int]
    calls: tuple[dict[str, Any], ...] = ()
    state: Any = None
    done: bool = False
    reward: float | None = None
    context: list[int] | None = None


class BranchLost(RuntimeError):
    """The environment could not bring a branch back to its state; the trajectory is left out. The message says why."""


class Environment:
    """The environment of `environment=none`, which never answers."""

    call_limit = 0
    # the tools' JSON schemas for the chat template; None if the template gets none
    schemas: list[dict[str, Any]] | None = None
    # whether answers may have a `context`
    changes_contexts = False
    # largest number of tokens of a turn; None for no limit but the response's
    max_turn_tokens: int | None = None
    # tokens that end a continuation, in addition to the model's end tokens
    stop_token_ids: Sequence[int] = ()
    # These tokens and the model's end tokens end this.
    token_end: Ends = Ends.TRAJECTORY
    # whether trajectories with equal tokens may end differently, as each has a state of its own
    ends_differ = False

    def open(self, row: Mapping[str, Any], seed: int) -> "Environment":
        """Return the environment of one prompt, a row of the data set; `seed` is equal for all its branches. Raise
        ValueError, which names the key, if the row asks for something that the environment does not have."""
        return self

    @asynccontextmanager
    async def opened(self, row: Mapping[str, Any], seed: int) -> AsyncIterator["Environment"]:
        """Open the environment of one prompt, and close it at the end of the block."""
        environment = self.open(row, seed)
        try:
            yield environment
        finally:
            await environment.close()

    async def close(self) -> None:
        """Close what this prompt's environment has opened. Nothing is answered afterwards."""

    async def stop(self) -> None:
        """Close what all prompts share, such as tools, when the worker ends."""

    def at(self, state: Any) -> "Environment":
        """Return the environment whose `stops`, `ends` and `max_turn_tokens` hold for turns after a state."""
        return self

    def release(self, state: Any) -> None:
        """Let go what a state holds, because a trajectory has ended in it without being done."""

    def stops(self, turn: Sequence[int]) -> list[str]:
        """Return the texts that end a continuation of a turn, given the turn's tokens so far."""
        return []

    def ends(self, turn: Sequence[int], end_tokens: Container[int]) -> TurnEnd:
        """Return what ends first in a turn, the model's tokens since the last answer, and where; `end_tokens` are those
        with which the model ends a response."""
        ended = bool(turn) and (turn[-1] in end_tokens or turn[-1] in self.stop_token_ids)
        return TurnEnd(self.token_end if ended else Ends.NO, len(turn))

    async def is_final(self, turn: Sequence[int]) -> bool:
        """Return whether a turn that has ended asks for no answer, so that the trajectory is complete without one."""
        return False

    async def first_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages of this prompt, with what the environment adds to them."""
        return list(messages)

    async def answer(self, state: Any, turn: Sequence[int], max_tokens: int) -> Answer:
        """Return the answer, of at most `max_tokens`, to a turn that has ended (`Ends.TURN`). It changes no state that
        another branch can see. `state` is that of the answer before the turn; None for the prompt's first state. Raise
        BranchLost if it cannot be reached again."""
        raise NotImplementedError

    def counted_rewards(self, rewards: Sequence[float | None]) -> list[float] | None:
        """Return what turns' rewards count for the trajectory's, their sum; None if the reward loop scores it."""
        return None

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        """Return metrics of a prompt, given descriptions of its calls; a shared call counts once."""
        return {}


NO_ENVIRONMENT = Environment()
