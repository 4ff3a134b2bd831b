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
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial

from mcp import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    CallToolResult,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
    Tool,
)

from verl.workers.rollout.engines.interface import result_in_thread
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError, ToolSet
from verl.workers.rollout.tools.function_calls import (
    MOST_DESCRIPTION_CHARACTERS,
    call_arguments,
    describe_function,
)
from verl.workers.rollout.tools.http_json import checked_url, is_loopback
from verl.workers.rollout.tools.mcp.session import McpServer, OpeningError, reason_of
from verl.workers.rollout.tools.mcp.transports import http_transport, stdio_transport
from verl.workers.rollout.tools.plain_text import one_line

LONGEST_MESSAGE = 2000  # largest number of characters of an error that the model reads


class MCPTool(ToolSet):
    """The tools of an MCP server. There is one session per process, which is opened anew when it has ended.

    Args:
        command: program and arguments of a server that talks over its standard input and output.
        url: address of a server that speaks streamable HTTP, instead of a command.
        tools: names of the server's tools that the model may call; None for all.
        pass_env: names of environment variables that the command gets beside HOME, LOGNAME, PATH, SHELL, TERM, USER.
        api_key_env: name of the environment variable with the key that the address gets as bearer token.
        request_timeout: time limit of one call, in seconds; the caller's time limit applies too.
        start_timeout: time limit for starting the command, or reaching the address, in seconds.

    Raises:
        ValueError: the server cannot be started or reached, or lacks a tool of `tools`; see also `check`.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        tools: Sequence[str] | None = None,
        pass_env: Sequence[str] = (),
        api_key_env: str | None = None,
        request_timeout: float = 60,
        start_timeout: float = 60,
    ):
        self.check(command, url, tools, pass_env, api_key_env, request_timeout, start_timeout)
        if command is not None:
            shown, connect = command[0], partial(stdio_transport, list(command), list(pass_env))
        else:
            key = os.environ[api_key_env] if api_key_env else None
            shown, connect = url, partial(http_transport, checked_url(url, "url"), key)
        server = McpServer(connect, start_timeout=start_timeout)
        offered = {tool.name: tool for tool in _listed(server, shown, start_timeout)}
        unknown = [name for name in tools or () if name not in offered]
        if unknown or not offered:
            result_in_thread(server.stop())
            names = ", ".join(sorted(offered)) or "no tools"
            raise ValueError(f"tools: the MCP server {shown} offers {names}, got {', '.join(unknown) or 'null'}")
        self.tools = [MCPFunction(server, offered[name], request_timeout) for name in tools or offered]

    @classmethod
    def check(
        cls,
        command: Sequence[str] | None = None,
        url: str | None = None,
        tools: Sequence[str] | None = None,
        pass_env: Sequence[str] = (),
        api_key_env: str | None = None,
        request_timeout: float = 60,
        start_timeout: float = 60,
    ) -> None:
        """Raise ValueError if parameters do not fit together, or if the program or a variable does not exist."""
        if (command is None) == (url is None):
            raise ValueError(f"expected command or url, got {command=}, {url=}")
        for key, texts in (("command", command), ("tools", tools), ("pass_env", pass_env)):
            is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
            if texts is not None and not (is_list and all(isinstance(text, str) and text for text in texts)):
                raise ValueError(f"{key}={texts!r}: expected a list of texts")
            if texts is not None and len(texts) == 0 and key != "pass_env":
                raise ValueError(f"{key} is empty")
        if command is not None and shutil.which(command[0]) is None:
            raise ValueError(f"command: there is no program {command[0]}")
        for key, seconds in (("request_timeout", request_timeout), ("start_timeout", start_timeout)):
            if not seconds > 0:
                raise ValueError(f"{key} must be positive, got {seconds!r}")
        for key, name in [("api_key_env", api_key_env)] * bool(api_key_env) + [("pass_env", name) for name in pass_env]:
            if name not in os.environ:
                raise ValueError(f"{key}: the environment variable {name} is not set")
        if url is not None and checked_url(url, "url").scheme != "https" and api_key_env:
            if not is_loopback(checked_url(url, "url")):
                raise ValueError(f"url must be https, since it is sent the key, got {url!r}")

    @classmethod
    def tags(cls, **params) -> list[str]:
        """Return the tags; without `tools`, start or reach the server and ask it for them."""
        if params.get("tools"):
            return [_tag_of(name) for name in params["tools"]]
        made = cls(**params)
        result_in_thread(made.tools[0].close())
        return [tool.trigger_tag for tool in made.tools]


class MCPFunction(BaseTool):
    """One tool of an MCP server."""

    argument = None

    def __init__(self, server: McpServer, tool: Tool, request_timeout: float):
        self.name = self.trigger_tag = _tag_of(tool.name)
        self.schema = tool.input_schema
        self.summary = one_line(tool.description or "", MOST_DESCRIPTION_CHARACTERS)
        self.description = describe_function(tool.description or "", tool.input_schema)
        self._server, self._tool, self._request_timeout = server, tool, request_timeout

    async def start(self, *, timeout: float) -> None:
        try:
            await self._server.run(self._server.client())
        except OpeningError as error:
            raise ToolError(str(error), kind="unreachable", retry=True) from error

    async def execute(self, content: str, *, timeout: float) -> str:
        arguments = call_arguments(self._tool.input_schema, content)
        return await self._server.run(self._call(arguments, min(timeout, self._request_timeout)))

    async def close(self) -> None:
        await self._server.stop()

    async def _call(self, arguments: dict, seconds: float) -> str:
        """Call the tool and return its text; it runs in the server's thread."""
        server = self._server
        try:
            client = await server.client()
            self.restarts += server.new_restarts()
            result = await asyncio.wait_for(client.call_tool(self._tool.name, arguments), seconds)
        except OpeningError as error:
            raise ToolError(f"{self.name}: its server cannot be reached", kind="unreachable", retry=True) from error
        except asyncio.TimeoutError:
            server.note_failure()
            message = f"{self.name} gave no answer in {seconds:g} seconds"
            raise ToolError(message, kind="timeout", retry=True) from None
        except asyncio.CancelledError:
            server.note_failure()
            raise
        except MCPError as error:
            raise self._protocol_error(error) from error
        except (ValueError, RuntimeError) as error:
            # A result that is none, or is not as its schema says.
            message = f"{self.name} sent an unreadable reply"
            raise ToolError(message, kind="bad_reply", retry=False, own_fault=True) from error
        server.note_answer()
        if result.is_error:
            message = one_line(result_text(result), LONGEST_MESSAGE) or f"{self.name} failed"
            raise ToolError(message, kind="tool_error", retry=False)
        return result_text(result)

    def _protocol_error(self, error: MCPError) -> ToolError:
        """Return the failure of a call that was answered with an error, or whose connection has ended."""
        if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):  # the latter: a server no longer knows the session
            self._server.note_failure(lost=error.code == INVALID_REQUEST)
            return ToolError(f"{self.name}: the connection to its server has ended", kind="cut_off", retry=True)
        self._server.note_answer()
        message = one_line(f"{self.name} failed: {error.message}", LONGEST_MESSAGE)
        if error.code == INVALID_PARAMS:
            return ToolError(message, kind="bad_arguments", retry=False)
        return ToolError(message, kind="protocol_error", retry=error.code == INTERNAL_ERROR, own_fault=True)


def result_text(result: CallToolResult) -> str:
    """Return a result's texts, one per line, or without content its structured content as JSON.

    A note such as `[image left out]` replaces pictures and sounds.
    """
    texts = []
    for block in result.content:
        if isinstance(block, TextContent):
            texts.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            texts.append(block.resource.text)
        else:
            texts.append(f"[{block.type} left out]")
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _tag_of(name: str) -> str:
    """Return the tag of a tool's name, which may have dots and slashes."""
    return re.sub(r"[^\w-]", "_", name)


def _listed(server: McpServer, shown: str, seconds: float) -> list[Tool]:
    """Return the tools that a server offers; raise ValueError if it cannot be asked."""
    try:
        return result_in_thread(asyncio.wait_for(server.run(server.list_tools()), 2 * seconds))
    except (OpeningError, MCPError, ValueError, asyncio.TimeoutError) as error:
        result_in_thread(server.stop())
        hangs = isinstance(error, asyncio.TimeoutError)
        reason = f"no list of tools in {2 * seconds:g} seconds" if hangs else reason_of(error)
        raise ValueError(f"the MCP server {shown} does not work: {reason}") from error
