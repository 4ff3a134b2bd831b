"""The base class of tools: a tool has a name, a tag that calls it, and an asynchronous `execute`.

    class Dice(BaseTool):
        name = "dice"
        trigger_tag = "roll"                      # the model writes <roll>6</roll>

        async def execute(self, content, *, timeout):
            return str(random.randint(1, int(content)))

`actor_rollout_ref.rollout.tools.tool_instances.dice.class_path` names the class; `params` are its constructor's
arguments. The tool box (tool_box.py) handles time limits, concurrency, retries and counting.
"""

import json
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any


class ToolError(Exception):
    """A failed call. The model reads the message, which must hold no secrets and no host paths.

    Args:
        kind: short name by which errors are counted and logged once, such as `timeout`, `http_500`, `bad_reply`.
        retry: whether the same call may succeed a moment later.
        own_fault: whether the tool is at fault, rather than the model's text; None for the value of `retry`. A run in
            which all calls fail by the tool's own fault ends.
        ends_session: whether the next call begins a new session (`ToolSession.end`).
    """

    def __init__(
        self, message: str, *, kind: str, retry: bool, own_fault: bool | None = None, ends_session: bool = False
    ):
        super().__init__(message)
        self.kind, self.retry, self.ends_session = kind, retry, ends_session
        self.own_fault = retry if own_fault is None else own_fault


def text_schema(argument: str | None) -> dict[str, Any]:
    """Return the JSON schema of arguments that are one text."""
    return {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}


def function_of(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a function in OpenAI's format."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


class ToolSession(ABC):
    """A session with a tool, or a group of tools, for one trajectory: calls see what earlier calls have left behind."""

    # whether it has ended by no fault of a call; it is then replaced by one that makes the calls again
    is_lost: bool = False

    async def execute(self, content: str, *, timeout: float) -> str:
        """Run one call, as `BaseTool.execute`; one at a time. A tool with its own `execute_in` does not need it."""
        raise NotImplementedError

    async def end(self) -> None:
        """Take the state after a call that has ended the session; only called if errors of the tool say so."""
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None: ...


class BaseTool(ABC):
    """A tool. There is one instance per rollout worker process; `execute` is called for many trajectories at once."""

    name: str
    trigger_tag: str
    # sentence about the tool for the chat template of `environment=chat`
    summary: str = ""
    # name of the argument that holds the text of a call in `environment=chat`; None if `schema` names the arguments
    argument: str | None = "text"
    # whether the calls of a trajectory share a session; a tree's other branches make its calls again in a new session
    has_session: bool = False
    # whether a call that is made again must return the same text, so that a branch is left out where it does not
    must_repeat: bool = True
    # whether making a session's calls again does no harm; if not, only tree=plain can have the tool
    may_repeat: bool = True
    # largest number of calls that run at once, in all tools of the group together; None for no limit
    calls_at_once: int | None = None

    @cached_property
    def group(self) -> str:
        """Tag of the first of the tools that share a connection, and so `calls_at_once` and a trajectory's session."""
        return self.trigger_tag

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a call's arguments: an object, here of one text."""
        return text_schema(self.argument)

    def function(self) -> dict[str, Any]:
        """Return the tool as a chat template describes it, a function in OpenAI's format."""
        return function_of(self.trigger_tag, self.summary, self.schema)

    def content_of(self, arguments: dict[str, Any]) -> str:
        """Return the text that `execute` takes for a call with these arguments, which `schema` allows."""
        return arguments[self.argument] if self.argument else json.dumps(arguments, ensure_ascii=False)

    def new_session(self) -> ToolSession:
        """Return a new session of the tool's group, which its first call opens; for tools with `has_session`."""
        raise NotImplementedError

    async def execute_in(self, session: ToolSession, content: str, *, timeout: float) -> str:
        """Run one call in a session of the tool's group, as `execute`; calls of one session do not overlap."""
        return await session.execute(content, timeout=timeout)

    @classmethod
    def tags(cls, **params) -> list[str]:
        """Return the tags of the tool with these arguments, which is made if only a made tool knows its tag."""
        return [getattr(cls, "trigger_tag", None) or cls(**params).trigger_tag]

    @classmethod
    def check(cls, **params) -> None:
        """Raise ValueError if something that `params` need is missing. It must be cheap; it precedes a run."""
        return None

    async def start(self, *, timeout: float) -> None:  # noqa: B027 (nothing to try, for many tools)
        """Raise ToolError if calls would fail here; the run then does not begin.

        It runs once before Ray starts and once in each rollout worker, each time on an instance that is closed then.
        """

    @abstractmethod
    async def execute(self, content: str, *, timeout: float) -> str:
        """Run one call; raise ToolError if it fails.

        `content` is the text between the tags; the model wrote it, so it may be hostile. After `timeout` seconds the
        caller cancels this coroutine, which must then end all that the call has started.
        """

    async def close(self) -> None:  # noqa: B027 (nothing to end, for many tools)
        """Close what the tool keeps open (workers, connections). Training may end a worker without calling this."""


class ToolSet:
    """Several tools of one entry of `tool_instances`, such as those of a server, to which the constructor may connect.

    It raises ValueError if the tools will not work. `check` and `tags` are those of `BaseTool`.
    """

    tools: list[BaseTool]

    @classmethod
    def check(cls, **params) -> None:
        return None

    @classmethod
    def tags(cls, **params) -> list[str]:
        return [tool.trigger_tag for tool in cls(**params).tools]
