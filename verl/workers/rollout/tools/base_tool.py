"""What a tool is: a name, the tag that calls it, and an asynchronous `execute`.

    class Dice(BaseTool):
        name = "dice"
        trigger_tag = "roll"                      # the model writes <roll>6</roll>

        async def execute(self, content, *, timeout):
            return str(random.randint(1, int(content)))

Named in `actor_rollout_ref.rollout.tools.tool_instances.dice.class_path`; `params` are its constructor's arguments.
Time limit, concurrency, retries and counting are the tool box's business (tool_box.py).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolOutput:
    """What the model reads, and whether it came from a cache."""

    text: str
    cached: bool = False


class ToolError(Exception):
    """A call that failed. The message is what the model reads.

    Args:
        message: for the model; no secrets, no host paths.
        kind: short name under which it is counted and logged once, such as `timeout`, `http_500`, `bad_reply`.
        retry: whether the same call may succeed a moment later.
        own_fault: whether the tool is at fault, and not what the model wrote. A run whose calls all fail by the tool's
            own fault ends. None: as `retry`.
    """

    def __init__(self, message: str, *, kind: str, retry: bool, own_fault: bool | None = None):
        super().__init__(message)
        self.kind, self.retry = kind, retry
        self.own_fault = retry if own_fault is None else own_fault


class BaseTool(ABC):
    """One instance per rollout worker process; `execute` is called for many trajectories at once."""

    name: str
    trigger_tag: str

    @classmethod
    def check(cls, **params) -> None:
        """Raises ValueError, before any process of a run starts, for what `params` need and is not there. Cheap."""
        return None

    async def start(self, *, timeout: float) -> None:  # noqa: B027 (nothing to try, for many tools)
        """Show that calls will work here. Runs before Ray starts and when a worker starts, on an instance of its own.

        Raises:
            ToolError: calls would fail; the run does not begin.
        """

    @abstractmethod
    async def execute(self, content: str, *, timeout: float) -> str | ToolOutput:
        """Run one call.

        Args:
            content: what stood between the tags, model-written: hostile.
            timeout: seconds after which the caller gives up and cancels this coroutine. Cancelling must end all that
                the call started.

        Raises:
            ToolError: the call failed.
        """

    async def close(self) -> None:  # noqa: B027 (nothing to end, for many tools)
        """Ends what the tool keeps open (workers, connections). In training that ends with the worker's process."""
