"""The environment of `environment=tools`: a turn ends with a closing tag, and the tool's result follows.

Calls of tools with sessions, such as a Python interpreter or a connection to an MCP server, see what earlier calls of
the same trajectory have left behind. A session is a live instance (../stateful.py): the first branch that continues
from a state has it, and other branches get a new session in which the calls are made again. Trajectories that part
before their first call share nothing.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

from verl.utils.fault_reports import RunError
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.environment import Answer, Ends, Environment, TurnEnd
from verl.workers.rollout.stateful import (
    Instance,
    InstanceKeys,
    InstanceLost,
    InstancePool,
    State,
    StatefulEnvironment,
    Step,
)
from verl.workers.rollout.tools.base_tool import ToolSession
from verl.workers.rollout.tools.plain_text import one_line
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall

MALFORMED = "malformed"  # error kind of a call that did not reach its tool
MAX_FAULT_CHARS = 300  # largest number of characters kept of a tool's report of its own fault

# pairs of a group of tools and the state of its session, in order of names; groups that were not called are left out
ToolStates = tuple[tuple[str, State], ...]


class ToolEnvironment(Environment):
    """Base class of environments whose answers come from tools; `pool` holds the live sessions of the worker's tools.
    An object serves the calls of one prompt, and is closed after it."""

    def __init__(self, tools: ToolBox, pool: InstancePool | None = None):
        self.tools, self.pool = tools, pool or InstancePool(InstanceKeys())
        self.sessions = ToolSessions(tools, self.pool)

    async def close(self) -> None:
        await self.sessions.close()

    async def stop(self) -> None:
        await self.tools.close()

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        """Return the numbers of calls, failures and other events, and the mean seconds of a call, in all and by tool,
        and the counts of the sessions."""
        metrics: dict[str, float] = {"tool_calls": len(calls), "tool_failures": sum(not call["ok"] for call in calls)}
        for tool in sorted({call["tool"] for call in calls}):
            own_calls = [call for call in calls if call["tool"] == tool]
            metrics |= {
                f"tool_{tool}/calls": len(own_calls),
                f"tool_{tool}/failures": sum(not call["ok"] for call in own_calls),
                f"tool_{tool}/own_faults": sum("fault" in call for call in own_calls),
                f"tool_{tool}/malformed": sum(call.get("error") == MALFORMED for call in own_calls),
                f"tool_{tool}/seconds": fmean(call["seconds"] for call in own_calls),
            }
        return {name: float(value) for name, value in metrics.items()} | self.sessions.metrics()


class Tools(ToolEnvironment):
    """The environment of `environment=tools`."""

    def __init__(self, tools: ToolBox, protocol: Protocol, pool: InstancePool | None = None):
        super().__init__(tools, pool)
        self.protocol, self.call_limit = protocol, tools.config.call_limit
        self.max_result_tokens = tools.config.max_result_tokens

    def open(self, row: Mapping[str, Any], seed: int) -> "Tools":
        """Return the environment with the tools that the row selects: of others, no tag ends a turn."""
        opened, selected = copy.copy(self), self.tools.selected_by(row)
        opened.sessions = ToolSessions(self.tools, self.pool)
        if len(selected) < len(self.tools.tools):
            opened.protocol = self.protocol.with_tools(selected)
        return opened

    def stops(self, turn: Sequence[int]) -> list[str]:
        return self.protocol.stops(turn)

    def ends(self, turn: Sequence[int], end_tokens: Container[int]) -> TurnEnd:
        call = self.protocol.first_call(turn) if turn else None
        return super().ends(turn, end_tokens) if call is None else TurnEnd(Ends.TURN, call[0])

    async def answer(self, state: ToolStates | None, turn: Sequence[int], max_tokens: int) -> Answer:
        tag, content = self.protocol.call(turn)
        if content is None:
            name, text = self.tools.tools[tag].name, f"Error: {tag} was closed but not opened"
            call = ToolCall(name, text, ok=False, seconds=0.0, error=MALFORMED)
        else:
            call, state = await self.sessions.call(state, tag, content)
        tokens = self.protocol.result_ids(call.text, min(self.max_result_tokens, max_tokens))
        return Answer(tokens, (description_of(call),), state)


def description_of(call: ToolCall) -> dict[str, Any]:
    """Return the description of a call for metrics and the viewer, in JSON's types."""
    about = {"tool": call.tool, "ok": call.ok, "seconds": round(call.seconds, 4)}
    about |= {"error": call.error} if call.error else {}
    return about | ({"fault": one_line(call.text, MAX_FAULT_CHARS)} if call.own_fault else {})


class ToolSessions:
    """The tools of one prompt, and the sessions with them."""

    def __init__(self, tools: ToolBox, pool: InstancePool):
        self.tools, self._closed = tools, False
        groups = {tool.group for tool in tools.tools.values() if tool.has_session}
        self._sessions = {group: _Sessions(tools, group, pool) for group in groups}

    async def call(self, states: ToolStates | None, tag: str, content: str) -> tuple[ToolCall, ToolStates | None]:
        """Return the outcome of a call and the sessions' states after it; raise BranchLost if a replay differs."""
        if self._closed:
            raise RuntimeError("this prompt's tools are closed")
        tool, states_before = self.tools.tools[tag], dict(states or ())
        if not tool.has_session:
            return await self.tools.call(tag, content), states
        before = states_before.get(tool.group) or State(None, None, Step(None))
        after = await self._sessions[tool.group].advance(before, (tag, content))
        return after.step.observation, tuple(sorted((states_before | {tool.group: after}).items(), key=itemgetter(0)))

    async def call_all(
        self, states: ToolStates | None, calls: Sequence[tuple[str, str]]
    ) -> tuple[list[ToolCall], ToolStates | None]:
        """Make several calls (tag, content), as `call`: those without sessions at once, the others in order."""
        at_once = [i for i, (tag, _) in enumerate(calls) if not self.tools.tools[tag].has_session]
        outcomes = await gather_or_cancel(*(self.call(states, *calls[i]) for i in at_once))
        done = {i: call for i, (call, _) in zip(at_once, outcomes, strict=True)}
        for i, (tag, content) in enumerate(calls):
            if i not in done:
                done[i], states = await self.call(states, tag, content)
        return [done[i] for i in range(len(calls))], states

    async def close(self) -> None:
        self._closed = True
        await asyncio.shield(asyncio.gather(*(sessions.close() for sessions in self._sessions.values())))

    def metrics(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for sessions in self._sessions.values():
            total.update(sessions.metrics([]))
        return dict(total)


class _Sessions(StatefulEnvironment):
    """The sessions with a group of tools; an action is a call, as its tag and its text."""

    def __init__(self, tools: ToolBox, group: str, pool: InstancePool):
        super().__init__(pool)
        self.tools, self.group, self.seconds = tools, group, None  # the tool box limits a call's time
        self._first = State(None, None, Step(None))
        self.counts["replayed_outputs_differ"] = 0

    def create(self) -> Instance:
        return _LiveSession(self.tools, self.group, self.tools.tools[self.group].new_session())

    def is_same(self, step: Step, recorded: Step) -> bool:
        if step.observation is None or recorded.observation.text == step.observation.text:
            return True
        self.counts["replayed_outputs_differ"] += 1
        return not self.tools.tools[self.group].must_repeat

    async def _replayed(self, state: State) -> Instance:
        tags = sorted({at.action[0] for at in state.path()})
        if once_only := [tag for tag in tags if not self.tools.tools[tag].may_repeat]:
            self.pool.free_place()
            raise RunError(
                f"a session in which {', '.join(once_only)} had been called was closed to make room for another, and "
                f"its calls must not be made again: raise environment.max_instances={self.pool.keys.max_instances} to "
                "the number of trajectories of a rollout worker"
            )
        return await super()._replayed(state)


class _LiveSession(Instance):
    def __init__(self, tools: ToolBox, group: str, session: ToolSession):
        self.tools, self.group, self.session = tools, group, session

    @property
    def is_lost(self) -> bool:
        return self.session.is_lost

    async def reset(self, recorded: None = None) -> None:
        return None

    async def step(self, action: tuple[str, str], recorded: Step | None = None) -> Step:
        if recorded is not None and recorded.observation.ended_session:
            await self.session.end()  # the call, which took too long for example, left nothing, and is not made again
            return recorded
        call = await self.tools.call(*action, self.session)
        if self.session.is_lost:
            raise InstanceLost(call.text)
        return Step(call)

    async def close(self) -> None:
        await self.tools.close_session(self.group, self.session)
