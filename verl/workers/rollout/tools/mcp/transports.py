"""Connections to MCP servers, for the client of the official package `mcp`: a process of its own, or HTTP.

What a server sends is bounded before it is parsed: a message above MAX_REPLY_BYTES becomes an error of its request. A
process that is started here gets no more of the environment than the config names, and the variable MARK, by which all
processes that it has started are ended with it.
"""

import asyncio
import os
import re
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx
import httpx2
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from verl.utils.marked_processes import kill_marked
from verl.workers.rollout.tools.http_json import MAX_REPLY_BYTES, is_loopback
from verl.workers.rollout.tools.plain_text import one_line

END_SECONDS = 2.0  # time for a server's process to end after its standard input was closed
LAST_SECONDS = 0.5  # time to read what a process has written before its end, if another holds its standard output open
CONNECT_SECONDS = 30.0
KEPT_ERROR_BYTES = 2000  # of a process's standard error
MAX_REASON_CHARS = 1000  # of these in a message
MARK = "VERL_MCP_CONNECTION"  # environment variable, different for each connection


# ---- a process ----

# where a reply's own id stands: before all else, or after all else as servers in TypeScript write it
FIRST_ID = rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,18})\b'
LAST_ID = rb'"id"\s*:\s*(\d{1,18})\s*\}\s*$'


@asynccontextmanager
async def stdio_transport(command: Sequence[str], pass_env: Sequence[str]) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server's process, yield the streams of its messages, and end it with all processes that it has started.
    It gets the variables `pass_env` beside HOME, LOGNAME, PATH, SHELL, TERM and USER. Raise ConnectionError, with its
    last words, when it has ended.

    The transport of `mcp` 2.3.0 keeps a line of any length in memory, does not notice the end of a process whose child
    holds its standard output, and leaves processes alone that have left its group, hence this one.
    """
    mark = uuid.uuid4().hex
    process = await asyncio.create_subprocess_exec(
        *command,
        env=get_default_environment() | {name: os.environ[name] for name in pass_env} | {MARK: mark},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_REPLY_BYTES,
        start_new_session=True,
    )
    last_words = bytearray()
    errors = asyncio.create_task(_keep_last(process.stderr, last_words))
    to_client, from_server = anyio.create_memory_object_stream[SessionMessage](0)
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        while message := await _next_message(process.stdout):
            await to_client.send(message)
        await asyncio.wait({errors}, timeout=END_SECONDS)
        raise ended()

    async def watch() -> None:
        while process.returncode is None:
            await asyncio.sleep(0.05)
        await asyncio.sleep(LAST_SECONDS)
        raise ended()

    def ended() -> ConnectionError:
        words = one_line(last_words.decode(errors="replace")[-MAX_REASON_CHARS:], MAX_REASON_CHARS)
        return ConnectionError(f"the server's process has ended; its last words: {words}")

    async def write() -> None:
        async for message in from_client:
            process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()

    try:
        async with anyio.create_task_group() as tasks:
            for task in (read, write, watch):
                tasks.start_soon(task)
            yield from_server, to_server
            tasks.cancel_scope.cancel()
    finally:
        for stream in (to_client, from_server, to_server, from_client):
            stream.close()
        errors.cancel()
        await _end(process, f"{MARK}={mark}".encode())


async def _keep_last(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Keep the last KEPT_ERROR_BYTES of a stream."""
    while chunk := await stream.read(KEPT_ERROR_BYTES):
        kept += chunk
        del kept[:-KEPT_ERROR_BYTES]


async def _next_message(stream: asyncio.StreamReader) -> SessionMessage | None:
    """Return the next message, None at the end. Lines that are no message, such as a print's, are passed over."""
    while True:
        line, whole = await _next_line(stream)
        if not line:
            return None
        if whole:
            with suppress(ValueError):
                return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        elif request := re.match(FIRST_ID, line) or re.search(LAST_ID, line):
            error = ErrorData(code=PARSE_ERROR, message=f"more than {MAX_REPLY_BYTES} bytes")
            return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(request[1]), error=error))


async def _next_line(stream: asyncio.StreamReader) -> tuple[bytes, bool]:
    """Return the next line and True, or both ends of one above the stream's limit and False; b"" at the end."""
    begin = end = b""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            line = error.partial
        except asyncio.LimitOverrunError as error:
            part = await stream.readexactly(error.consumed)
            begin, end = begin or part[:200], (end + part[-200:])[-200:]
            continue
        return (begin + b" " + (end + line)[-200:], False) if begin else (line, True)


async def _end(process: asyncio.subprocess.Process, mark: bytes) -> None:
    """End a process, its group, and all with its mark: close its input, and kill what is left after END_SECONDS."""
    try:
        process.stdin.close()
        await _wait(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        kill_marked(mark)
    await _wait(process)
    # A process that has left the group may hold the pipes open. Nothing public closes them.
    process._transport.close()


async def _wait(process: asyncio.subprocess.Process) -> None:
    """Wait up to END_SECONDS for the end. `process.wait` would also wait until nobody holds the pipes open."""
    for _ in range(int(END_SECONDS / 0.01)):
        if process.returncode is not None:
            return
        await asyncio.sleep(0.01)


# ---- HTTP ----


@asynccontextmanager
async def http_transport(url: httpx.URL, headers: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams of a server's messages over streamable HTTP. The environment's proxies are used except for this
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
