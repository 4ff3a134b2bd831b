"""Tools of an MCP server (Model Context Protocol): a process that is started here, or an address.

    tool_instances:
      library:
        class_path: verl.workers.rollout.tools.mcp.tool.MCPTool
        params: {command: [python, my_project/library_server.py], tools: [search, fetch]}

Each of the server's tools has its name as tag: <fetch>{"page": 3}</fetch>. In the tag, `_` replaces characters other
than letters, digits, `_` and `-`. tools/function_calls.py says what the text between the tags may be.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from mcp import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

from verl.workers.config.keys import read_keys
from verl.workers.rollout.engines.interface import result_in_thread
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError, ToolSession, ToolSet
from verl.workers.rollout.tools.function_calls import MAX_DESCRIPTION_CHARS, call_arguments, describe_function
from verl.workers.rollout.tools.http_json import checked_url
from verl.workers.rollout.tools.mcp.keys import MCPKeys
from verl.workers.rollout.tools.mcp.session import ConnectionLost, McpConnection, McpServer, OpeningError, reason_of
from verl.workers.rollout.tools.mcp.transports import http_transport, stdio_transport
from verl.workers.rollout.tools.plain_text import one_line

LONGEST_MESSAGE = 2000  # largest number of characters of an error that the model reads


class MCPTool(ToolSet):
    """The tools of an MCP server.

    Args:
        params: values of the keys of `MCPKeys`.

    Raises:
        ValueError: the server cannot be started or reached, or lacks a tool of `tools`; or a key has a wrong value.
    """

    def __init__(self, **params: Any):
        keys = _keys(params)
        if keys.url is None:
            shown, connect = keys.command[0], partial(stdio_transport, keys.command, keys.pass_env)
        else:
            shown, connect = keys.url, partial(http_transport, checked_url(keys.url, "url"), keys.headers())
        server = McpServer(connect, start_timeout=keys.start_timeout, has_sessions=keys.session == "trajectory")
        connection = McpConnection(server, reopens=True)
        offered = {tool.name: tool for tool in _listed(connection, shown, keys.start_timeout)}
        unknown = [name for name in keys.tools or () if name not in offered]
        if unknown or not offered:
            result_in_thread(server.stop())
            names = ", ".join(sorted(offered)) or "no tools"
            raise ValueError(f"tools: the MCP server {shown} offers {names}, got {', '.join(unknown) or 'null'}")
        if keys.session == "trajectory":
            result_in_thread(server.run(connection.end()))
        chosen = keys.tools or list(offered)
        group = _tag_of(chosen[0], keys.prefix)
        self.tools = [MCPFunction(connection, offered[name], keys, group) for name in chosen]

    @classmethod
    def check(cls, **params: Any) -> None:
        """Raise ValueError if parameters do not fit together, or if the program or a variable does not exist."""
        _keys(params)

    @classmethod
    def tags(cls, **params: Any) -> list[str]:
        """Return the tags; without `tools`, start or reach the server and ask it for them."""
        keys = _keys(params)
        if keys.tools:
            return [_tag_of(name, keys.prefix) for name in keys.tools]
        made = cls(**params)
        result_in_thread(made.tools[0].close())
        return [tool.trigger_tag for tool in made.tools]


class MCPSession(ToolSession):
    """A trajectory's own connection to a server, with all of the server's tools."""

    def __init__(self, server: McpServer):
        self.connection = McpConnection(server, reopens=False)

    async def close(self) -> None:
        await self.connection.server.run(self.connection.end())


class MCPFunction(BaseTool):
    """One tool of an MCP server.

    Args:
        connection: connection for all calls, or with `session: trajectory` only for the trial.
        tool: the server's description of the tool.
        keys: parameters of the server.
        group: tag of the first of the server's tools.
    """

    argument = None

    def __init__(self, connection: McpConnection, tool: Tool, keys: MCPKeys, group: str):
        self.name = self.trigger_tag = _tag_of(tool.name, keys.prefix)
        self.schema = tool.input_schema
        self.summary = one_line(tool.description or "", MAX_DESCRIPTION_CHARS)
        self.description = describe_function(tool.description or "", tool.input_schema)
        self.has_session = keys.session == "trajectory"
        hints = tool.annotations
        says_so = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        self.may_repeat = says_so or keys.allow_repeated_calls or not self.has_session
        self.calls_at_once = keys.max_calls()
        self.group, self._request_timeout = group, keys.request_timeout
        self._connection, self._server, self._tool = connection, connection.server, tool

    async def start(self, *, timeout: float) -> None:
        try:
            await self._server.run(self._connection.client())
        except OpeningError as error:
            raise ToolError(str(error), kind="unreachable", retry=True) from error

    async def execute(self, content: str, *, timeout: float) -> str:
        return await self._execute(self._connection, content, timeout)

    def new_session(self) -> MCPSession:
        return MCPSession(self._server)

    async def execute_in(self, session: ToolSession, content: str, *, timeout: float) -> str:
        assert isinstance(session, MCPSession)
        return await self._execute(session.connection, content, timeout)

    async def close(self) -> None:
        await self._server.stop()

    async def _execute(self, connection: McpConnection, content: str, timeout: float) -> str:
        arguments = call_arguments(self._tool.input_schema, content)
        return await self._server.run(self._call(connection, arguments, min(timeout, self._request_timeout)))

    async def _call(self, connection: McpConnection, arguments: dict, seconds: float) -> str:
        """Call the tool and return its text; it runs in the server's thread."""
        # A call without an answer may have taken effect. Where there is state, a second one would be one too many.
        retry = connection.reopens
        try:
            client = await connection.client()
            self.restarts += connection.new_restarts()
            result = await asyncio.wait_for(client.call_tool(self._tool.name, arguments), seconds)
        except ConnectionLost:
            message = f"{self.name}: the session has ended, and what its calls left behind is lost"
            raise ToolError(message, kind="session_lost", retry=False, own_fault=True) from None
        except OpeningError as error:
            raise ToolError(f"{self.name}: its server cannot be reached", kind="unreachable", retry=True) from error
        except asyncio.TimeoutError:
            connection.note_failure()
            message = f"{self.name} gave no answer in {seconds:g} seconds"
            raise ToolError(message, kind="timeout", retry=retry, own_fault=True) from None
        except asyncio.CancelledError:
            connection.note_failure()
            raise
        except MCPError as error:
            raise self._protocol_error(connection, error) from error
        except (ValueError, RuntimeError) as error:
            # A result that is none.
            message = f"{self.name} sent an unreadable reply"
            raise ToolError(message, kind="bad_reply", retry=False, own_fault=True) from error
        connection.note_answer()
        if result.is_error:
            message = one_line(result_text(result), LONGEST_MESSAGE) or f"{self.name} failed"
            raise ToolError(message, kind="tool_error", retry=False)
        return result_text(result)

    def _protocol_error(self, connection: McpConnection, error: MCPError) -> ToolError:
        """Return the failure of a call that was answered with an error, or whose connection has ended."""
        if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):  # the latter: a server no longer knows the session
            connection.note_failure(lost=error.code == INVALID_REQUEST)
            message = f"{self.name}: the connection to its server has ended"
            return ToolError(message, kind="cut_off", retry=connection.reopens, own_fault=True)
        connection.note_answer()
        message = one_line(f"{self.name} failed: {error.message}", LONGEST_MESSAGE)
        if error.code == INVALID_PARAMS:
            return ToolError(message, kind="bad_arguments", retry=False)
        again = error.code == INTERNAL_ERROR and connection.reopens
        return ToolError(message, kind="protocol_error", retry=again, own_fault=True)


def result_text(result: CallToolResult) -> str:
    """Return a result's texts, one per line, or without content its structured content as JSON.

    A link to a resource becomes its name and address. A note such as `[image left out]` replaces pictures and sounds.
    """
    texts = []
    for block in result.content:
        if isinstance(block, TextContent):
            texts.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            texts.append(block.resource.text)
        elif isinstance(block, ResourceLink):
            texts.append(f"{block.name}: {block.uri}")
        else:
            texts.append(f"[{block.type} left out]")
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _keys(params: Mapping[str, Any]) -> MCPKeys:
    return read_keys(MCPKeys, params, "params")


def _tag_of(name: str, prefix: str) -> str:
    """Return the tag of a tool's name, which may have dots and slashes."""
    return re.sub(r"[^\w-]", "_", f"{prefix}_{name}" if prefix else name)


def _listed(connection: McpConnection, shown: str, seconds: float) -> list[Tool]:
    """Return the tools that a server offers; raise ValueError if it cannot be asked."""
    server = connection.server
    try:
        return result_in_thread(asyncio.wait_for(server.run(connection.list_tools()), 2 * seconds))
    except (OpeningError, MCPError, ValueError, asyncio.TimeoutError) as error:
        result_in_thread(server.stop())
        hangs = isinstance(error, asyncio.TimeoutError)
        reason = f"no list of tools in {2 * seconds:g} seconds" if hangs else reason_of(error)
        raise ValueError(f"the MCP server {shown} does not work: {reason}") from error
