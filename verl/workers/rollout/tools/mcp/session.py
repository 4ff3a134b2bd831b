"""Sessions with an MCP server, by the official package `mcp`, one after the other in a thread of their own.

A session belongs to one task, which opens it and waits until it is to end; calls are other tasks of the same thread.
When it has ended, for instance because the server was killed, the next call opens another one.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp_types import Tool

from verl.workers.rollout.tools.mcp.transports import END_SECONDS, SHOWN_CHARACTERS
from verl.workers.rollout.tools.plain_text import one_line

MOST_FAILURES = 3  # number of calls in a row without an answer after which a session is given up
MOST_PAGES = 100  # of a server's list of tools

T = TypeVar("T")
Transport = AbstractAsyncContextManager[Any]

logger = logging.getLogger(__name__)


class OpeningError(Exception):
    """A session cannot be opened. The message is for the user; it may hold paths and the server's own words."""


class McpServer:
    """A server, and the open session with it.

    Args:
        transport: function that makes a new connection (transports.py).
        start_timeout: time limit for opening a session, in seconds.
    """

    def __init__(self, transport: Callable[[], Transport], *, start_timeout: float):
        self._transport, self._start_timeout = transport, start_timeout
        self._session: _Session | None = None
        self._all: set[_Session] = set()  # sessions that have not ended
        self._opened, self._reported, self._failures = 0, 0, 0
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="MCP sessions", daemon=True).start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the sessions' thread and return its result; cancelling the caller cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def stop(self) -> None:
        """End the sessions and the thread; a server that was started here ends with them."""
        if not self._stopped:
            self._stopped = True
            await self.run(self._end_all())
            self._loop.call_soon_threadsafe(self._loop.stop)

    # These run in the sessions' thread.

    async def client(self) -> Client:
        """Return the open session, or open one.

        Raises:
            OpeningError: none can be opened.
        """
        if self._session is None or self._session.ended:
            self._failures = 0
            self._session = _Session(self._transport(), self._start_timeout)
            self._all.add(self._session)
            self._session.task.add_done_callback(lambda _, session=self._session: self._all.discard(session))
            self._session.opened.add_done_callback(self._count)
        return await asyncio.shield(self._session.opened)

    def _count(self, opened: "asyncio.Future[Client]") -> None:
        self._opened += opened.exception() is None

    def new_restarts(self) -> int:
        """Return the number of sessions, without the very first, that have been opened since the last call of this."""
        restarts = max(0, self._opened - 1 - self._reported)
        self._reported += restarts
        return restarts

    async def list_tools(self) -> list[Tool]:
        """Return the tools that the server offers."""
        client, tools, cursor = await self.client(), [], None
        for _ in range(MOST_PAGES):
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
        """Note a call without an answer. The session is given up if it is lost, or after MOST_FAILURES in a row."""
        self._failures += 1
        if self._session is not None and (lost or self._failures >= MOST_FAILURES):
            self._session.end()
            self._session = None

    async def _end_all(self) -> None:
        for session in self._all:
            session.end()
        if self._all:
            await asyncio.wait([session.task for session in self._all])


class _Session:
    """A session in a task of its own, because a connection must be left by the task that has entered it.

    Attributes:
        opened: future of the open client, or of an OpeningError.
        task: task that has the session; it never fails.
        ended: whether the session takes no more calls; its task may still be ending the server.
    """

    def __init__(self, transport: Transport, seconds: float):
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Client] = self._loop.create_future()
        self.ended = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(transport))
        self._limit = self._loop.call_later(seconds, self._give_up, f"no answer in {seconds:g} seconds")

    def end(self) -> None:
        """End the session, by force if the server does not let go."""
        self._leave.set()
        self._loop.call_later(3 * END_SECONDS, self.task.cancel)

    def _give_up(self, reason: str) -> None:
        self.ended = True
        self._fail(reason)
        self.task.cancel()

    async def _run(self, transport: Transport) -> None:
        try:
            async with Client(transport, cache=None) as client:
                self._limit.cancel()
                self.opened.set_result(client)
                try:
                    await self._leave.wait()
                finally:
                    self.ended = True
        except asyncio.CancelledError:
            self._fail("the session was ended while it opened")
        except BaseException as error:  # also groups of exceptions with a cancellation among them
            self._fail(reason_of(error))
        finally:
            self.ended = True
            self._limit.cancel()

    def _fail(self, reason: str) -> None:
        if not self.opened.done():
            self.opened.set_exception(OpeningError(reason))
        elif not self._leave.is_set() and self.opened.exception() is None:
            logger.warning("a session with an MCP server has ended, and the next call opens another: %s", reason)


def reason_of(error: BaseException) -> str:
    """Return the message of the exception that ended a connection, in one line.

    In a group of exceptions it is the first that is no MCPError, because MCPErrors of unanswered requests only follow.
    """
    causes = [error]
    while any(hasattr(cause, "exceptions") for cause in causes):
        causes = [inner for cause in causes for inner in getattr(cause, "exceptions", [cause])]
    # That requests were not answered follows from what has ended the connection.
    cause = min(causes, key=lambda cause: isinstance(cause, MCPError))
    return one_line(str(cause), SHOWN_CHARACTERS) or type(cause).__name__
