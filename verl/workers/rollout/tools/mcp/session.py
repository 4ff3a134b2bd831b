"""Connections to an MCP server, by the official package `mcp`, in a thread of their own.

An open connection belongs to one task, which opens it and waits until it is to end; calls are other tasks of the same
thread. The connection that all trajectories share is opened anew when it has ended, for instance because the server was
killed. That of one trajectory is not, since what its calls have left behind ends with it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp.client.client import ConnectMode
from mcp_types import CallToolResult, Tool

from verl.workers.rollout.tools.mcp.transports import END_SECONDS, MAX_REASON_CHARS
from verl.workers.rollout.tools.plain_text import one_line

MAX_FAILURES = 3  # number of calls in a row without an answer after which a connection is given up
MAX_TOOL_PAGES = 100  # of a server's list of tools

T = TypeVar("T")
Transport = AbstractAsyncContextManager[Any]

logger = logging.getLogger(__name__)


class OpeningError(Exception):
    """A connection cannot be opened. The message is for the user; it may hold paths and the server's own words."""


class ConnectionLost(Exception):
    """A connection that is not opened anew has ended."""


class McpServer:
    """A server, and the thread of the connections to it.

    Args:
        transport: function that makes a new connection (transports.py).
        has_sessions: whether a connection is a session of the protocol. Revision 2026-07-28 has none, and is not used.
    """

    def __init__(self, transport: Callable[[], Transport], *, start_timeout: float, has_sessions: bool):
        self._transport, self._start_timeout = transport, start_timeout
        self._mode: ConnectMode = "legacy" if has_sessions else "auto"
        self._all: set[_OpenConnection] = set()  # sessions that have not ended
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="MCP sessions", daemon=True).start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the connections' thread and return its result; cancelling the caller cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def stop(self) -> None:
        """End the connections and the thread; a server that was started here ends with them."""
        if not self._stopped:
            self._stopped = True
            await self.run(self.end(set(self._all)))
            self._loop.call_soon_threadsafe(self._loop.stop)

    # These run in the connections' thread.

    def open(self) -> "_OpenConnection":
        session = _OpenConnection(self._transport(), self._mode, self._start_timeout)
        self._all.add(session)
        session.task.add_done_callback(lambda _: self._all.discard(session))
        return session

    async def end(self, sessions: "set[_OpenConnection]") -> None:
        for session in sessions:
            session.end()
        if sessions:
            await asyncio.wait([session.task for session in sessions])


class McpConnection:
    """A connection to a server, which the first call opens, and with `reopens` a later one after it has ended. All
    methods run in the server's thread."""

    def __init__(self, server: McpServer, *, reopens: bool):
        self.server, self.reopens = server, reopens
        self._session: _OpenConnection | None = None
        self._opened, self._reported, self._failures = 0, 0, 0

    async def client(self) -> Client:
        """Return the client, opened if need be. Raise OpeningError, or ConnectionLost if it does not reopen."""
        if self._session is None or self._session.ended:
            if self._opened and not self.reopens:
                raise ConnectionLost
            self._failures, self._session = 0, self.server.open()
            self._session.opened.add_done_callback(self._count)
        return await asyncio.shield(self._session.opened)

    def _count(self, opened: "asyncio.Future[Client]") -> None:
        self._opened += opened.exception() is None

    def new_restarts(self) -> int:
        """Return the number of openings, without the very first, since the last call of this."""
        restarts = max(0, self._opened - 1 - self._reported)
        self._reported += restarts
        return restarts

    async def list_tools(self) -> list[Tool]:
        """Return the tools that the server offers."""
        client, tools, cursor = await self.client(), [], None
        for _ in range(MAX_TOOL_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    def note_answer(self) -> None:
        """Note that the server has answered a call, with a result or an error; reset the count of failures."""
        self._failures = 0

    def note_failure(self, *, lost: bool = False) -> None:
        """Note a call without an answer. The connection ends if it is lost, or after MAX_FAILURES in a row."""
        self._failures += 1
        if self._session is not None and (lost or self._failures >= MAX_FAILURES):
            self._session.end()

    async def end(self) -> None:
        """End the connection, and wait until a server that was started for it has ended."""
        if self._session is not None:
            await self.server.end({self._session})


class _OpenConnection:
    """An open connection in a task of its own, because it must be left by the task that has entered it.

    Attributes:
        opened: future of the open client, or of an OpeningError.
        task: task that has the session; it never fails.
        ended: whether the connection takes no more calls; its task may still be ending the server.
    """

    def __init__(self, transport: Transport, mode: ConnectMode, seconds: float):
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Client] = self._loop.create_future()
        self.ended = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(Client(transport, mode=mode, cache=None)))
        self._limit = self._loop.call_later(seconds, self._give_up, f"no answer in {seconds:g} seconds")

    def end(self) -> None:
        """End the connection, by force if the server does not let go."""
        self.ended = True
        self._leave.set()
        self._loop.call_later(3 * END_SECONDS, self.task.cancel)

    def _give_up(self, reason: str) -> None:
        self.ended = True
        self._fail(reason)
        self.task.cancel()

    async def _run(self, entered: Client) -> None:
        try:
            async with entered as client:
                self._limit.cancel()
                # The model reads a result's text, also if the result has no structured content or not that of the
                # tool's output schema, which would be an error of the client.
                setattr(client.session, "validate_tool_result", _accept)  # noqa: B010 (mypy refuses the assignment)
                self.opened.set_result(client)
                try:
                    await self._leave.wait()
                finally:
                    self.ended = True
        except asyncio.CancelledError:
            self._fail("the connection was ended while it opened")
        except BaseException as error:  # also groups of exceptions with a cancellation among them
            self._fail(reason_of(error))
        finally:
            self.ended = True
            self._limit.cancel()

    def _fail(self, reason: str) -> None:
        if not self.opened.done():
            self.opened.set_exception(OpeningError(reason))
        elif not self._leave.is_set() and self.opened.exception() is None:
            logger.warning("a connection to an MCP server has ended: %s", reason)


async def _accept(name: str, result: CallToolResult) -> None:
    """Accept every result."""


def reason_of(error: BaseException) -> str:
    """Return the message of the exception that ended a connection, in one line.

    In a group of exceptions it is the first that is no MCPError, because MCPErrors of unanswered requests only follow.
    """
    causes = [error]
    while any(hasattr(cause, "exceptions") for cause in causes):
        causes = [inner for cause in causes for inner in getattr(cause, "exceptions", [cause])]
    # That requests were not answered follows from what has ended the connection.
    cause = min(causes, key=lambda cause: isinstance(cause, MCPError))
    return one_line(str(cause), MAX_REASON_CHARS) or type(cause).__name__
