"""The tools of one prompt. Calls of tools with sessions see what earlier calls of the same trajectory have left behind.

A session, such as a Python interpreter or a connection to an MCP server, is a live instance (../stateful.py): the first
branch that continues from a state has it, and other branches get a new session in which the calls are made again.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.stateful import Instance, InstanceLost, InstancePool, State, StatefulEnvironment, Step
from verl.workers.rollout.tools.base_tool import ToolSession
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall

ToolStates = Mapping[str, State]  # tag -> state of the tool's session; tools that were not called are left out


class ToolSessions:
    """The tools of one prompt, and the sessions with them."""

    def __init__(self, tools: ToolBox, pool: InstancePool):
        self.tools = tools
        self._sessions = {tag: _Sessions(tools, tag, pool) for tag, tool in tools.tools.items() if tool.has_session}

    async def call(self, states: ToolStates | None, tag: str, content: str) -> tuple[ToolCall, ToolStates | None]:
        """Call a tool and return the outcome, and the sessions' states after the call.

        Raises:
            BranchLost: the session could not be brought back.
        """
        if tag not in self._sessions:
            return await self.tools.call(tag, content), states
        after = await self._sessions[tag].advance((states or {}).get(tag), content)
        return after.step.observation, {**(states or {}), tag: after}

    async def call_all(
        self, states: ToolStates | None, calls: Sequence[tuple[str, str]]
    ) -> tuple[list[ToolCall], ToolStates | None]:
        """Make several calls (tag, content), as `call`: those without sessions at once, the others in order."""
        at_once = [i for i, (tag, _) in enumerate(calls) if tag not in self._sessions]
        done = dict(zip(at_once, await gather_or_cancel(*(self.tools.call(*calls[i]) for i in at_once)), strict=True))
        for i, (tag, content) in enumerate(calls):
            if i not in done:
                done[i], states = await self.call(states, tag, content)
        return [done[i] for i in range(len(calls))], states

    async def close(self) -> None:
        for sessions in self._sessions.values():
            await sessions.close()

    def metrics(self) -> dict[str, float]:
        """Return the sums of the sessions' metrics; none without tools that have sessions."""
        total: Counter[str] = Counter()
        for sessions in self._sessions.values():
            total.update(sessions.metrics([]))
        return dict(total)


class _Sessions(StatefulEnvironment):
    """The sessions with one tool; an action is the text of a call."""

    def __init__(self, tools: ToolBox, tag: str, pool: InstancePool):
        super().__init__(pool)
        self.tools, self.tag, self.seconds = tools, tag, None  # the tool box limits a call's time

    def create(self) -> Instance:
        return _LiveSession(self.tools, self.tag, self.tools.tools[self.tag].new_session())

    def is_same(self, step: Step, recorded: Step) -> bool:
        if step.observation is None or recorded.observation.text == step.observation.text:
            return True
        self.counts["replayed_outputs_differ"] += 1
        return not self.tools.tools[self.tag].must_repeat


class _LiveSession(Instance):
    def __init__(self, tools: ToolBox, tag: str, session: ToolSession):
        self.tools, self.tag, self.session = tools, tag, session

    @property
    def is_lost(self) -> bool:
        return self.session.is_lost

    async def reset(self) -> None:
        return None

    async def step(self, action: str) -> Step:
        call = await self.tools.call(self.tag, action, self.session)
        if self.session.is_lost:
            raise InstanceLost(call.text)
        return Step(call)

    async def repeat(self, recorded: State) -> Step:
        """Make a call again. One that has ended its session, by a time limit for example, is not: it left nothing."""
        if not recorded.step.observation.ended_session:
            return await self.step(recorded.action)
        await self.session.end()
        return recorded.step

    async def close(self) -> None:
        await self.tools.close_session(self.tag, self.session)
