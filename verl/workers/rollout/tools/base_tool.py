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
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class ToolOutput:
    """A tool's text for the model, and whether it came from a cache."""

    text: str
    cached: bool = False


class ToolError(Exception):
    """A failed call. The model reads the message.

    Args:
        message: message for the model, without secrets and host paths.
        kind: short name by which errors are counted and logged once, such as `timeout`, `http_500`, `bad_reply`.
        retry: whether the same call may succeed a moment later.
        own_fault: whether the tool is at fault, rather than the model's text. A run in which all calls fail by the
            tool's own fault ends. If it is None, it takes the value of `retry`.
        ends_session: whether the call has ended its session, so that the next call begins anew (`ToolSession.end`).
    """

    def __init__(
        self, message: str, *, kind: str, retry: bool, own_fault: bool | None = None, ends_session: bool = False
    ):
        super().__init__(message)
        self.kind, self.retry, self.ends_session = kind, retry, ends_session
        self.own_fault = retry if own_fault is None else own_fault


class ToolSession(ABC):
    """A session with a tool for one trajectory, whose calls see what earlier calls have left behind."""

    @abstractmethod
    async def execute(self, content: str, *, timeout: float) -> str | ToolOutput:
        """Run one call, as `BaseTool.execute`; one at a time."""

    @property
    def is_lost(self) -> bool:
        """Whether the session has ended by no fault of a call; it is replaced by one that makes the calls again."""
        return False

    async def end(self) -> None:
        """Take the state after a call that has ended the session; only called if errors of the tool say so."""
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None:
        """End the session, and all that its calls have started."""


class BaseTool(ABC):
    """A tool. There is one instance per rollout worker process; `execute` is called for many trajectories at once."""

    name: str
    trigger_tag: str
    # text for the prompt with `describe_in_prompt=true`: what the tool does and what a call must hold; empty for none
    description: str = ""
    # sentence about the tool for the chat template of `environment=chat`; empty: `description`
    summary: str = ""
    # name of the argument that holds the text of a call in `environment=chat`; None if `schema` names the arguments
    argument: str | None = "text"
    # number of lost connections that calls have opened anew; it only grows
    restarts: int = 0
    # whether the calls of a trajectory share a session; a tree's other branches make its calls again in a new session
    has_session: bool = False
    # whether a call that is made again must return the same text, so that a branch is left out where it does not
    must_repeat: bool = True

    def new_session(self) -> ToolSession:
        """Return a new session, which its first call opens; only called if the tool `has_session`."""
        raise NotImplementedError

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a call's arguments: an object, here of one text."""
        return {"type": "object", "properties": {self.argument: {"type": "string"}}, "required": [self.argument]}

    def function(self) -> dict[str, Any]:
        """Return the tool as a chat template describes it, a function in OpenAI's format."""
        about = {"name": self.trigger_tag, "description": self.summary or self.description, "parameters": self.schema}
        return {"type": "function", "function": about}

    def content_of(self, arguments: dict[str, Any]) -> str:
        """Return the text that `execute` takes for a call with these arguments, which `schema` allows."""
        return arguments[self.argument] if self.argument else json.dumps(arguments, ensure_ascii=False)

    @classmethod
    def tags(cls, **params) -> list[str]:
        """Return the tags of the tool that the constructor makes with these arguments.

        If only a made tool knows its tag, an override makes one, which takes as long as the constructor.
        """
        return [cls.trigger_tag]

    @classmethod
    def check(cls, **params) -> None:
        """Raise ValueError if something that `params` need is missing. It must be cheap; it precedes a run."""
        return None

    async def start(self, *, timeout: float) -> None:  # noqa: B027 (nothing to try, for many tools)
        """Check that calls will work here.

        It runs once before Ray starts and once in each rollout worker, each time on an instance that is closed then.

        Args:
            timeout: seconds after which the caller gives up.

        Raises:
            ToolError: calls would fail; the run does not begin.
        """

    @abstractmethod
    async def execute(self, content: str, *, timeout: float) -> str | ToolOutput:
        """Run one call.

        Args:
            content: text between the tags; the model wrote it, so it may be hostile.
            timeout: seconds after which the caller gives up and cancels this coroutine, which must then end all that
                the call has started.

        Raises:
            ToolError: the call failed.
        """

    async def close(self) -> None:  # noqa: B027 (nothing to end, for many tools)
        """Close what the tool keeps open (workers, connections). Training may end a worker without calling this."""


class ToolSet(ABC):
    """Several tools that one entry of `tool_instances` brings, such as those of one server.

    `check` and `tags` are those of `BaseTool`; the constructor may connect to the server, and raises ValueError if its
    tools will not work.
    """

    tools: list[BaseTool]

    @classmethod
    @abstractmethod
    def check(cls, **params) -> None: ...

    @classmethod
    @abstractmethod
    def tags(cls, **params) -> list[str]: ...
