"""The environment of `environment=agent`: a program that calls an OpenAI-compatible address, here the gateway's.

    program ── request ──> Gateway ──> AgentRequest, the observation
            <── reply ─── Gateway <── Reply, the action: what the model's turn says

A branch is a second run of the program, which gets the recorded replies up to the fork. A turn reads its request's
messages: behind what was read and sampled before, if they continue that, and else as a context (contexts.py).
"""

import asyncio
import copy
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl.utils.fault_reports import cause_of
from verl.utils.user_code import finite_number
from verl.workers.config.keys import STRICT
from verl.workers.rollout.agent.chat_completions import AgentRequest, plain_message
from verl.workers.rollout.agent.gateway import Gateway, Reply, Session
from verl.workers.rollout.agent.process import Outcome, Program, Programs
from verl.workers.rollout.chat.calls import CallReader, schema_for_parser, without_thoughts
from verl.workers.rollout.chat.template import ChatTemplate
from verl.workers.rollout.contexts import END_OF_THINKING, THINK, ContextRule
from verl.workers.rollout.environment import Answer, BranchLost, Ends, TurnEnd
from verl.workers.rollout.stateful import Instance, InstanceKeys, InstancePool, State, StatefulEnvironment, Step
from verl.workers.rollout.tools.protocol import stops_after

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.05  # time between two looks for requests other than the recorded one, in a replay
OTHER_SECONDS = 2.0  # how long it then waits for the recorded one


@keys_dataclass(frozen=True, config=STRICT)
class AgentKeys(InstanceKeys):
    """Keys under `environment` with environment=agent (recipe/common/config/environment/agent.yaml)."""

    command: list[str] | None = None
    class_path: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    memory_mb: int | None = Field(default=None, ge=64)
    host: str = "127.0.0.1"
    replay: bool = False
    ignored: list[str] = Field(default_factory=list)
    reasoning: Literal["hidden", "content"] = "hidden"
    max_steps: int = Field(default=20, ge=1)
    reward: Literal["result", "task"] = "task"

    def __post_init__(self):
        if (self.command is None) == (self.class_path is None):
            raise ValueError(
                f"environment.command={self.command}, environment.class_path={self.class_path}: expected exactly one"
            )
        for pattern in self.ignored:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"environment.ignored={pattern!r}: no regular expression: {error}") from error
        if self.max_context is not None:
            raise ValueError(f"environment.max_context={self.max_context}: an agent chooses its messages itself")

    @property
    def change_contexts(self) -> bool:
        return True


class Said(NamedTuple):
    """An action: a reply, and a number that keeps equal replies apart where no two trajectories may share a program."""

    reply: Reply
    number: int = 0


class AgentInstance(Instance):
    """A run of the program, which waits for the reply to its last request."""

    def __init__(self, agents: "Agents", row: Mapping[str, Any]):
        self.agents, self.row = agents, row
        self.session: Session | None = None
        self.program: Program | None = None

    async def prepare(self, make_room: Callable[[Exception], None]) -> None:
        await self.agents.start()

    async def reset(self, recorded: AgentRequest | None = None) -> AgentRequest:
        session = self.session = self.agents.gateway.open()
        self.program = self.agents.programs.start(self.row, session.base_url, session.api_key)
        step = await self._next(session, self.program, recorded)
        if step.done:
            outcome = step.observation
            raise RuntimeError(f"the agent ended without a request: {outcome.failed or outcome.result}")
        return step.observation

    async def step(self, action: "Said", recorded: Step | None = None) -> Step:
        assert self.session is not None and self.program is not None, "reset comes first"
        self.session.reply(self.request, action.reply)
        expected = None if recorded is None else recorded.observation
        return await self._next(self.session, self.program, expected)

    async def _next(self, session: Session, program: Program, expected: AgentRequest | None) -> Step:
        """Return the next request, that which is expected if it comes among others, or the program's outcome."""
        ended = asyncio.ensure_future(program.outcome())
        came = asyncio.ensure_future(session.next_request(expected))
        try:
            while True:
                seconds = LOOK_SECONDS if expected else None
                await asyncio.wait({ended, came}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if came.done():
                    self.request = came.result()
                    return Step(self.request)
                if ended.done():
                    outcome = ended.result()
                    return Step(outcome, self.agents.reward_of(outcome), done=True)
                if expected and session.requests:
                    await asyncio.wait({ended, came}, timeout=OTHER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if not came.done() and not ended.done():
                        return Step(session.requests[0])  # differs from what is expected
        finally:
            for task in (ended, came):
                task.cancel()

    async def close(self) -> None:
        if self.session is not None:
            self.session.close()
        if self.program is not None:
            await self.program.end()


class Agents:
    """The gateway and the server of the programs, which all prompts of a worker share."""

    can_copy = False

    def __init__(self, keys: AgentKeys):
        self.keys, self.gateway = keys, Gateway(keys.host, keys.ignored)
        self.programs = Programs(keys.command, keys.class_path, keys.env, keys.memory_mb)
        self.warned: set[str] = set()  # kinds of failures

    async def start(self) -> None:
        await self.gateway.start()
        await self.programs.prepare()

    async def stop(self) -> None:
        await self.programs.stop()
        await self.gateway.stop()

    def reward_of(self, outcome: Outcome) -> float | None:
        """Return a program's reward: its result, or 0 if it failed or its result is no number."""
        why = outcome.failed
        kind = why.partition(":")[0]
        if not why and self.keys.reward == "result":
            try:
                return finite_number(float(outcome.result), "the result")
            except ValueError:
                kind, why = "no number", f"its result {outcome.result!r:.80} is no number"
        if why and kind not in self.warned:
            self.warned.add(kind)
            logger.warning(f"an agent failed, and its reward is 0: {why}; others of this kind are not told")
        return 0.0


@dataclass(frozen=True)
class Exchange:
    """A request and the model's turn."""

    request: AgentRequest
    read: list[int]  # all that the turn has read
    then_read: list[int]  # all that later turns read of it: `read` and the turn, perhaps without its thinking
    turn: list[int]
    sent: dict[str, Any]  # the turn as the program got it
    whole: dict[str, Any]  # the turn with what was hidden or cut


@dataclass(frozen=True)
class Conversation:
    """The state after an answer: the program's state, its request, all that the next turn reads, and what was said."""

    state: State
    request: AgentRequest = field(compare=False)
    read: list[int] = field(compare=False)
    exchanges: tuple[Exchange, ...] = field(default=(), compare=False)


class Agent(StatefulEnvironment):
    """The environment of a worker, and by `open` of a prompt."""

    changes_contexts = True
    token_end = Ends.TURN

    def __init__(self, keys: AgentKeys, template: ChatTemplate, reader: CallReader):
        super().__init__(InstancePool(keys, keeps_idle=not keys.replay))
        self.keys, self.template, self.reader = keys, template, reader
        self.agents = Agents(keys)
        self.tokenizer = template.builder.tokenizer
        self.rule = ContextRule(keys, self.tokenizer)
        self.stop_token_ids = reader.stop_token_ids
        self.call_limit = keys.max_steps
        self.row: dict[str, Any] = {}
        self.numbers = count(1)
        self.first: Conversation | None = None
        self.present: AgentRequest | None = None  # the request that the present turn answers

    def open(self, row: Mapping[str, Any], seed: int) -> "Agent":
        opened = copy.copy(self)
        StatefulEnvironment.__init__(opened, self.pool)
        opened.row, opened.numbers = row_of_agent(row, seed), count(1)
        return opened

    def create(self) -> Instance:
        return AgentInstance(self.agents, self.row)

    async def stop(self) -> None:
        await self.agents.stop()

    def counted_rewards(self, rewards: Sequence[float | None]) -> list[float] | None:
        return None if self.keys.reward == "task" else [reward or 0.0 for reward in rewards]

    @property
    def ends_differ(self) -> bool:  # type: ignore[override]
        return not self.keys.replay

    # ---- turns ----

    async def first_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages of the program's first request, whose tools become `schemas`."""
        state = await self.first_state()
        request = state.step.observation
        self.schemas = list(request.tools) or None
        self.first = Conversation(state, request, self._built(request))
        return list(request.messages)

    def _built(self, request: AgentRequest) -> list[int]:
        messages, tools = list(request.messages), list(request.tools) or None
        return list(self.template.builder.build_initial_tokens(messages, tools=tools))

    def at(self, state: Conversation | None) -> "Agent":
        environment = copy.copy(self)
        environment.present = (state or self.first).request
        return environment

    @property
    def max_turn_tokens(self) -> int | None:  # type: ignore[override]
        return self.present.max_tokens if self.present else None

    def release(self, state: Conversation | State | None) -> None:
        super().release(state.state if isinstance(state, Conversation) else state)

    def stops(self, turn: Sequence[int]) -> list[str]:
        return stops_after(self.tokenizer.decode(list(turn[-32:])), list(self.present.stop))

    def ends(self, turn: Sequence[int], end_tokens: Container[int]) -> TurnEnd:
        most = len(turn) + 1 if self.present.max_tokens is None else self.present.max_tokens
        if self._has_stop(turn):
            n = bisect_left(range(len(turn)), True, key=lambda length: self._has_stop(turn[:length]))
            return TurnEnd(Ends.TURN, min(n, most))
        return TurnEnd(Ends.TURN, most) if len(turn) >= most else super().ends(turn, end_tokens)

    def _has_stop(self, turn: Sequence[int]) -> bool:
        stops = self.present.stop
        return bool(stops) and first_of(stops, self.tokenizer.decode(list(turn))) is not None

    async def answer(self, state: Conversation | None, turn: Sequence[int], max_tokens: int) -> Answer:
        before = state or self.first
        reply, whole = await self._said(before, turn)
        after = await self.advance(before.state, Said(reply, 0 if self.keys.replay else next(self.numbers)))
        outcome = after.step.observation
        if after.step.done:
            return Answer([], ({"tool": "agent", "ok": not outcome.failed},), after, True, after.step.reward)
        then_read = self.rule.with_turn(list(before.read), turn)
        exchange = Exchange(before.request, before.read, then_read, list(turn), _message(reply), whole)
        exchanges = (*before.exchanges, exchange)
        try:
            read, shown, kind = self._read(exchanges, outcome)
        except Exception as error:  # a template may raise anything, and must not end the run
            super().release(after)
            raise BranchLost(f"the chat template does not render the agent's messages: {cause_of(error)}") from error
        self.counts[f"agent_{kind}"] += 1
        context = None if read == [*before.read, *turn, *shown] else read
        if context is not None:
            shown = shown[: max(max_tokens, 0)]  # the row only tells what was read
        conversation = Conversation(after, outcome, read, exchanges)
        return Answer(shown if len(shown) <= max_tokens else [], (), conversation, context=context)

    async def _said(self, before: Conversation, turn: Sequence[int]) -> tuple[Reply, dict[str, Any]]:
        """Return a turn as the program gets it, and as a message with all its text."""
        text, calls = await self.reader.message(turn, _parser_schemas(before.request.tools))
        content = text = self.template.control_tokens.removed(text)
        if self.keys.reasoning == "hidden":
            content = "" if THINK in text and END_OF_THINKING not in text else without_thoughts(text).lstrip("\n")
        stop = first_of(before.request.stop, content)
        content = content[:stop]
        ended = stop is not None or turn[-1] in self.template.ends or turn[-1] in self.stop_token_ids
        reason = "tool_calls" if calls else "stop" if ended else "length"
        said = tuple((call.name, call.arguments) for call in calls)
        reply = Reply(content, said, reason, len(before.read), len(turn))
        return reply, _message(reply) | {"content": text}

    def _read(self, exchanges: Sequence[Exchange], request: AgentRequest) -> tuple[list[int], list[int], str]:
        """Return what the turn after a request reads, the part of it that follows the last turn in the row, and how the
        request follows from the earlier ones: it `continued` the last one, or an `earlier` one, it has `rewritten` what
        the model said, or is a `new` conversation."""
        last = exchanges[-1]
        for exchange in reversed(exchanges):
            rest = request.messages[len(exchange.request.messages) :]
            if not request.follows(exchange.request) or rest[0]["role"] != "assistant":
                continue
            shown = self.template.after(exchange.turn, exchange.sent, rest[1:], self.schemas)
            if _is_same(rest[0], exchange.sent) or _is_same(rest[0], exchange.whole):
                read, kind = [*exchange.then_read, *shown], "continued" if exchange is last else "earlier"
            else:
                read, kind = self.template.extended(exchange.read, rest) or self._built(request), "rewritten"
            break
        else:
            read, kind = self._built(request), "new"
        if kind in ("earlier", "new"):
            asked = {"role": "user", "content": request.messages[-1]["content"]}
            shown = self.template.message(last.turn, asked)
        return read, shown, kind


def first_of(stops: Sequence[str], text: str) -> int | None:
    """Return where the first of the stop texts begins in a text; None if it holds none of them."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def row_of_agent(row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return what a program gets of a row of the data set, in JSON's types; not the reference answer."""
    messages = [dict(message) for message in row.get("raw_prompt", row.get("prompt", ()))]
    about = {"messages": messages, "extra_info": row.get("extra_info") or {}, "seed": seed}
    return json.loads(json.dumps(about, default=str))


def _message(reply: Reply) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in reply.tool_calls]
    return plain_message({"role": "assistant", "content": reply.content, "tool_calls": calls})


def _is_same(message: dict[str, Any], said: dict[str, Any]) -> bool:
    """Return whether a message is what the model said; blanks at its ends do not count."""
    return message | {"content": message["content"].strip()} == said | {"content": said["content"].strip()}


def _parser_schemas(tools: Sequence[Mapping[str, Any]]) -> list[OpenAIFunctionToolSchema]:
    schemas = []
    for tool in tools:
        with suppress(ValueError, KeyError, TypeError):  # a program's tools may have any form
            schemas.append(schema_for_parser(tool))
    return schemas
