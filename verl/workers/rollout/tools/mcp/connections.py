"""Connections to an MCP server, by the official package `mcp`: to a process of its own or over HTTP, in a thread.

An open connection belongs to one task, which opens it and waits until it is to end; calls are other tasks of the same
thread. The connection that all trajectories share is opened anew when it has ended, for instance because the server was
killed. That of one trajectory is not, since what its calls have left behind ends with it.

What a server sends over HTTP is bounded before it is parsed: a message above MAX_REPLY_BYTES becomes an error of its
request. A process that is started here is a program that the user trusts. It gets no more of the environment than the
config names, and the variable MARK, by which all processes that it has started are ended with it.
"""

import asyncio
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TextIO, TypeVar

import anyio
import httpx
import httpx2
from mcp import Client, MCPError
from mcp.client.client import ConnectMode
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CallToolResult, Tool

from verl.utils.marked_processes import kill_marked
from verl.workers.rollout.tools.base_tool import ToolSession
from verl.workers.rollout.tools.http_json import MAX_REPLY_BYTES, is_loopback
from verl.workers.rollout.tools.plain_text import one_line

END_SECONDS = 10.0  # time for a connection to end; `stdio_client` takes up to 6.5 s to end its process
CONNECT_SECONDS = 30.0
MAX_REASON_CHARS = 1000  # length of a process's last words
MARK = "VERL_MCP_CONNECTION"  # environment variable, different for each connection
MAX_TOOL_PAGES = 100  # length of a server's list of tools

T = TypeVar("T")
Transport = AbstractAsyncContextManager[Any]

logger = logging.getLogger(__name__)


class OpeningError(Exception):
    """A connection cannot be opened. The message is for the user; it may hold paths and the server's own words."""


class ConnectionLost(Exception):
    """A connection that is not opened anew has ended."""


class McpServer:
    """A server, and the thread of the connections to it, which `transport` makes.

    With `has_sessions` a connection is a session of the protocol; its revision 2026-07-28, without any, is not used.
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


class McpConnection(ToolSession):
    """A connection to a server, which the first call opens, and with `reopens` a later one after it has ended. All
    methods but `close` run in the server's thread."""

    def __init__(self, server: McpServer, *, reopens: bool):
        self.server, self.reopens = server, reopens
        self._session: _OpenConnection | None = None
        self._was_open = False

    async def client(self) -> Client:
        """Return the client, opened if need be. Raise OpeningError, or ConnectionLost if it does not reopen."""
        if self._session is None or self._session.ended:
            if self._was_open and not self.reopens:
                raise ConnectionLost
            self._session = self.server.open()
        client = await asyncio.shield(self._session.opened)
        self._was_open = True
        return client

    async def list_tools(self) -> list[Tool]:
        client, tools, cursor = await self.client(), [], None
        for _ in range(MAX_TOOL_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    def drop(self, client: Client) -> None:
        """End the connection of this client, because the server no longer knows it."""
        if self._session is not None and self._session.client is client:  # and not one that was opened since then
            self._session.end()

    async def close(self) -> None:
        """End the connection, and wait until a server that was started for it has ended."""
        if self._session is not None:
            await self.server.run(self.server.end({self._session}))


class _OpenConnection:
    """An open connection in a task of its own, because it must be left by the task that has entered it."""

    def __init__(self, transport: Transport, mode: ConnectMode, seconds: float):
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Client] = self._loop.create_future()  # or of an OpeningError
        self.client: Client | None = None
        self.ended = False  # whether it takes no more calls; its task may still be ending the server
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(Client(transport, mode=mode, cache=None)))  # the task never fails
        self._limit = self._loop.call_later(seconds, self._give_up, f"no answer in {seconds:g} seconds")

    def end(self) -> None:
        """End the connection, by force if the server does not let go."""
        self.ended = True
        self._leave.set()
        self._loop.call_later(END_SECONDS, self.task.cancel)

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
                self.client = client
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
    """Return the message of the exception that ended a connection, in one line."""
    causes = [error]
    while any(hasattr(cause, "exceptions") for cause in causes):
        causes = [inner for cause in causes for inner in getattr(cause, "exceptions", [cause])]
    # MCPErrors of unanswered requests only follow from what has ended the connection.
    cause = min(causes, key=lambda cause: isinstance(cause, MCPError))
    return one_line(str(cause), MAX_REASON_CHARS) or type(cause).__name__


# ---- a process ----


@asynccontextmanager
async def stdio_transport(command: Sequence[str], pass_env: Sequence[str]) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server's process, yield the streams of its messages, and end it with all processes that it has started.
    Raise ConnectionError, with its last words, when it has closed its standard output."""
    mark = uuid.uuid4().hex
    env = {name: os.environ[name] for name in pass_env} | {MARK: mark}
    server = StdioServerParameters(command=command[0], args=list(command[1:]), env=env)
    to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)

    async def pass_on(messages: Any, errors: TextIO) -> None:
        async for message in messages:
            await to_client.send(message)
        raise ConnectionError(f"the server's process has ended; its last words: {_last_words(errors)}")

    try:
        with tempfile.TemporaryFile("w+") as errors:
            async with stdio_client(server, errors) as (messages, to_server), anyio.create_task_group() as tasks:
                tasks.start_soon(pass_on, messages, errors)
                yield from_server, to_server
                tasks.cancel_scope.cancel()
    finally:
        to_client.close()
        from_server.close()
        kill_marked(f"{MARK}={mark}".encode())


def _last_words(errors: TextIO) -> str:
    """Return the end of what a process has written to its standard error."""
    file = errors.fileno()  # not to be moved: other processes may still write
    end = os.pread(file, MAX_REASON_CHARS, max(0, os.fstat(file).st_size - MAX_REASON_CHARS))
    return one_line(end.decode(errors="replace"), MAX_REASON_CHARS)


# ---- HTTP ----


@asynccontextmanager
async def http_transport(url: httpx.URL, headers: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams of a server's messages over streamable HTTP, with the environment's proxies except for this
    machine. Raise PermissionError if the server refuses access."""
    client = httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **headers},
        trust_env=not is_loopback(url),
        timeout=httpx2.Timeout(CONNECT_SECONDS, read=None),  # a call has a time limit of its own
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        event_hooks={"response": [_bound]},
    )
    streams = streamable_http_client(str(url), http_client=client, max_sse_event_size=MAX_REPLY_BYTES)
    async with client, streams as both:
        yield both


async def _bound(response: httpx2.Response) -> None:
    """Bound a response's body; `mcp` itself bounds events only."""
    if response.status_code in (401, 403):
        raise PermissionError(f"the server refuses access: HTTP status {response.status_code}")
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = _Bounded(response.stream, "content-encoding" in response.headers)


class _Bounded(httpx2.AsyncByteStream):
    """A body that fails with an error of its own request if it is compressed or has more than MAX_REPLY_BYTES."""

    def __init__(self, body: httpx2.AsyncByteStream, compressed: bool):
        self.body, self.compressed = body, compressed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self.body:
            size += len(chunk)
            if self.compressed or size > MAX_REPLY_BYTES:
                raise httpx2.StreamError(f"compressed, or more than {MAX_REPLY_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self.body.aclose()
