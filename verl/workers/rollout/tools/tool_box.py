"""The tools of a rollout worker, built from the config and called with limits on time and number.

tools:
  call_limit: 3
  tool_instances:
    python: {class_path: verl.workers.rollout.tools.python.tool.PythonTool, params: {}}
"""

import asyncio
import importlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass

from verl.workers.config.keys import STRICT
from verl.workers.rollout.engines.interface import result_in_thread
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError, ToolSession, ToolSet
from verl.workers.rollout.tools.tool_runners import ToolThread

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SECTION = "actor_rollout_ref.rollout.tools"
RESERVED_TAGS = ("think", "result", "answer")
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds between attempts, doubling
START_SECONDS = 120.0  # shortest time limit for the trial of a tool
CLOSE_SECONDS = 30.0  # time limit for a tool to close what it has opened


@keys_dataclass(frozen=True, config=STRICT)
class ToolsConfig:
    """Keys under actor_rollout_ref.rollout.tools, named as in the code published with arXiv 2507.19849.

    Args:
        call_limit: largest number of calls of one trajectory; a further call ends it.
        max_workers: largest number of calls that run at once in this process.
        timeout: time limit of one attempt, in seconds.
        retry_count: largest number of further attempts, if the tool's error allows one.
        max_result_tokens: largest number of tokens of a result with `environment=tools`; a longer one is cut. Those of
            `environment=chat` are limited by `multi_turn.max_tool_response_length`.
        tool_instances: name -> {class_path, params}; null switches a tool off.
        verbose_logging: whether every call is logged, not only the first failure of each kind.
        fail_on_error: whether a tool that cannot be loaded ends the run; otherwise it is reported and left out.
    """

    call_limit: int = Field(default=3, ge=0)
    max_workers: int = Field(default=64, ge=1)
    timeout: float = Field(default=120.0, gt=0)
    retry_count: int = Field(default=3, ge=0)
    max_result_tokens: int = Field(default=1024, ge=1)
    verbose_logging: bool = False
    fail_on_error: bool = True
    tool_instances: dict[str, Any] = Field(default_factory=dict)

    def __post_init__(self):
        present = {name: instance for name, instance in self.tool_instances.items() if instance is not None}
        object.__setattr__(self, "tool_instances", present)
        if self.fail_on_error:
            for name, instance in present.items():
                cls, params = tool_class(name, instance)
                with _named(name):
                    cls.check(**params)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Let a ValueError name an entry of tool_instances."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{_SECTION}.tool_instances.{name}: {error}") from error


# the tools' modules in the scripts of arXiv 2507.19849 -> ours
AUTHORS_MODULES = {
    "verl.workers.rollout.tools.python_tool": "verl.workers.rollout.tools.python.tool",
    "verl.workers.agent.tools.search_tool": "verl.workers.rollout.tools.search.tool",
}


def tool_class(name: str, instance: Mapping[str, Any]) -> tuple[type[BaseTool] | type[ToolSet], dict[str, Any]]:
    """Return the class and arguments of an entry of tool_instances; a ValueError names the wrong key."""
    key = f"{_SECTION}.tool_instances.{name}"
    unknown = sorted(set(instance) - {"class_path", "params"})
    if unknown or not instance.get("class_path"):
        raise ValueError(f"{key}: expected class_path and params, got {sorted(instance)}")
    module, _, attribute = instance["class_path"].rpartition(".")
    try:
        cls = getattr(importlib.import_module(AUTHORS_MODULES.get(module, module)), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}.class_path={instance['class_path']}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, (BaseTool, ToolSet))):
        from verl.workers.rollout.tools.upstream_tool import adapted

        if (cls := adapted(cls)) is None:
            raise ValueError(f"{key}.class_path={instance['class_path']} is no BaseTool")
    params = dict(instance.get("params") or {})
    try:
        inspect.signature(cls).bind(**params)
    except TypeError as error:
        raise ValueError(f"{key}.params: {error}; {cls.__name__}{inspect.signature(cls)}") from error
    return cls, params


@dataclass(frozen=True)
class ToolCall:
    """The outcome of a call."""

    tool: str
    text: str  # for the model, also after a failure
    ok: bool
    seconds: float  # duration of all attempts, without the waits for a free place and between attempts
    error: str | None = None  # a failure's `kind`
    own_fault: bool = False  # whether the tool is at fault
    ended_session: bool = False


class ToolBox:
    """All tools of a process by their tags, which are not `think`, `result` or `answer`."""

    def __init__(self, config: ToolsConfig):
        self.config = config
        self.tools: dict[str, BaseTool] = {}
        self._threads: dict[str, ToolThread] = {}  # tag -> thread
        self._opened: list[tuple[BaseTool, ToolThread]] = []  # all that have been made, also those with a wrong tag
        self._places = asyncio.Semaphore(config.max_workers)
        self._group_places: dict[str, asyncio.Semaphore] = {}  # group of tools -> places for its `calls_at_once`
        self._logged: set[tuple[str, str]] = set()
        try:
            for name, instance in config.tool_instances.items():
                self._load(name, instance)
        except BaseException:
            result_in_thread(self.close())
            raise
        if not self.tools:
            raise ValueError(f"{_SECTION}.tool_instances names no tool that can be loaded")

    def _load(self, name: str, instance: Mapping[str, Any]) -> None:
        key = f"{_SECTION}.tool_instances.{name}"
        try:
            cls, params = tool_class(name, instance)
            with _named(name):
                made = cls(**params)
        except Exception as error:
            if self.config.fail_on_error:
                raise
            logger.error(f"tool {name} is left out: {error}")
            return
        for tool in made.tools if isinstance(made, ToolSet) else [made]:
            tag = tool.trigger_tag
            self._opened.append((tool, thread := ToolThread(tool.name)))
            if tag in RESERVED_TAGS:
                raise ValueError(f"{key}: <{tag}> belongs to the protocol")
            if tag in self.tools:
                raise ValueError(f"{key}: a second tool for <{tag}>; an MCP server's get other tags by params.prefix")
            if tool.calls_at_once is not None:
                self._group_places.setdefault(tool.group, asyncio.Semaphore(tool.calls_at_once))
            self.tools[tag], self._threads[tag] = tool, thread

    def selected_by(self, row: Mapping[str, Any]) -> list[str]:
        """Return the tags that a row selects by `extra_info.tool_selection` or a column `tools`, by default all."""
        key, names = "extra_info.tool_selection", (row.get("extra_info") or {}).get("tool_selection")
        if names is None:
            key, names = "tools", row.get("tools")
        if names is None or not len(names):
            return list(self.tools)
        selected = [names] if isinstance(names, str) else list(names)
        if unknown := [name for name in selected if not (isinstance(name, str) and name in self.tools)]:
            raise ValueError(
                f"row {row.get('index')}: {key} names {', '.join(map(str, unknown))}, and the tools of "
                f"actor_rollout_ref.rollout are {', '.join(self.tools)}"
            )
        return selected

    def check_tree(self, tree: str | None) -> None:
        """Raise ValueError if the tree would repeat calls that must be made once only."""
        once_only = [tag for tag, tool in self.tools.items() if tool.has_session and not tool.may_repeat]
        if once_only and tree != "plain":
            raise ValueError(
                f"actor_rollout_ref.rollout.tree={tree} makes a session's calls again for further branches, which may "
                f"do harm: the server of {', '.join(once_only)} says neither readOnlyHint nor idempotentHint. Set "
                "params.allow_repeated_calls=true if they do none, leave these tools out by params.tools, or set "
                "tree=plain or, if the server has no state, params.session=shared"
            )

    async def start(self) -> None:
        """Check that every tool works; raise ValueError if not, or with `fail_on_error=false` log it."""
        seconds = max(self.config.timeout, START_SECONDS)
        for tool in self.tools.values():
            trial = partial(self._threads[tool.trigger_tag].run, partial(tool.start, timeout=seconds), seconds)
            try:
                await self._retried(trial)
            except (ToolError, asyncio.TimeoutError) as error:
                why = error if isinstance(error, ToolError) else f"no answer in {seconds:g} seconds"
                message = f"{_SECTION}.tool_instances.{tool.name}: its calls would fail: {why}"
                if self.config.fail_on_error:
                    raise ValueError(message) from error
                logger.error(message)

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of an attempt; after a ToolError that allows it, make up to `retry_count` further ones."""
        wait = FIRST_WAIT
        for _ in range(self.config.retry_count):
            try:
                return await attempt()
            except ToolError as error:
                if not error.retry:
                    raise
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        return await attempt()

    async def close(self) -> None:
        """Close what the tools have opened: sandboxes, connections, caches."""
        for tool, thread in self._opened:
            try:
                await thread.run(tool.close, CLOSE_SECONDS)
            except Exception as error:  # an error here must not hide why the tools are closed, nor keep others open
                logger.warning(f"tool {tool.name} did not end what it has started: {error!r}")
            finally:
                thread.stop()

    async def call(self, tag: str, content: str, session: ToolSession | None = None) -> ToolCall:
        """Run the tool of a tag, in a session if it has one; a failure of any kind gives `ok=False`."""
        tool, seconds = self.tools[tag], 0.0
        # A session has a connection of its own, and no two calls at once.
        limit = nullcontext() if session else self._group_places.get(tool.group, nullcontext())

        async def attempt() -> str:
            nonlocal seconds
            async with limit, self._places:
                started = time.perf_counter()
                try:
                    return await self._attempt(tool, content, session)
                finally:
                    seconds += time.perf_counter() - started

        try:
            text = await self._retried(attempt)
            outcome = ToolCall(tool.name, text, True, seconds)
        except ToolError as error:
            faults = error.kind, error.own_fault, error.ends_session
            outcome = ToolCall(tool.name, f"Error: {error}", False, seconds, *faults)
        if self.config.verbose_logging:
            logger.warning(f"tool {tool.name}: {outcome.error or 'ok'} in {seconds:.2f} s")
        return outcome

    async def close_session(self, tag: str, session: ToolSession) -> None:
        await self._threads[tag].run(session.close, CLOSE_SECONDS)

    async def _attempt(self, tool: BaseTool, content: str, session: ToolSession | None) -> str:
        """Return the text for the model; raise ToolError for a fault of any kind, which must not end the training."""
        timeout, thread = self.config.timeout, self._threads[tool.trigger_tag]
        execute = partial(tool.execute_in, session) if session else tool.execute
        try:
            text = await thread.run(partial(execute, content, timeout=timeout), timeout)
            if not isinstance(text, str):
                raise TypeError(f"{tool.name} returned {text!r:.200}, expected a text")
            return text
        except ToolError as fault:
            error = fault
        except asyncio.TimeoutError:
            # In a session the call may still take effect, and a second one would then be one too many.
            retry, message = session is None, f"{tool.name} gave no answer in {timeout:g} seconds"
            error = ToolError(message, kind="timeout", retry=retry, own_fault=True)
        except Exception as fault:
            kind = type(fault).__name__
            error = ToolError(f"{tool.name} failed: {kind}", kind=kind, retry=False, own_fault=True)
            error.__cause__ = fault
        if (tool.name, error.kind) not in self._logged:
            self._logged.add((tool.name, error.kind))
            logger.warning(f"tool {tool.name} failed ({error.kind}); further ones are counted only", exc_info=error)
        raise error


def try_tools(config: ToolsConfig, tree: str | None = "plain") -> None:
    """Build all tools, check that their calls will work, and close them; works inside and outside an event loop.

    A ValueError names the key of a tool that does not work, or not with the run's tree (`ToolBox.check_tree`).
    """

    async def start_and_close() -> None:
        tools = ToolBox(config)
        try:
            tools.check_tree(tree)
            await tools.start()
        finally:
            await tools.close()

    result_in_thread(start_and_close())
