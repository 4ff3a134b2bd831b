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
from functools import partial
from typing import Annotated, Any, Literal

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
from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass

from verl.workers.config.keys import STRICT, read_keys
from verl.workers.rollout.engines.interface import result_in_thread
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError, ToolSession, ToolSet
from verl.workers.rollout.tools.function_calls import call_arguments
from verl.workers.rollout.tools.http_json import checked_url, is_loopback
from verl.workers.rollout.tools.mcp.connections import (
    ConnectionLost,
    McpConnection,
    McpServer,
    OpeningError,
    http_transport,
    reason_of,
    stdio_transport,
)
from verl.workers.rollout.tools.plain_text import one_line

Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
CALLS_AT_ONCE = {"stdio": 1, "http": 16}  # largest number of calls in flight on a connection
MAX_DESCRIPTION_CHARS = 1000  # length of a tool's description
MAX_MESSAGE_CHARS = 2000  # largest number of characters of an error that the model reads


@keys_dataclass(frozen=True, config=STRICT)
class MCPKeys:
    """Keys under `params` of an entry of `tool_instances`.

    Args:
        command: program and arguments of a server that talks over its standard input and output.
        url: address of a server that speaks streamable HTTP, instead of a command.
        tools: names of the server's tools that the model may call; None for all.
        prefix: beginning of all tags, `<prefix>_<name>`; empty for tags that are the tools' names.
        session: `shared`: one connection for all trajectories of a process, for a server without state. `trajectory`:
            each trajectory has a connection of its own, and with a command a process of its own.
        allow_repeated_calls: whether the calls of a trajectory's session may be made again for further branches, also
            of tools that are neither readOnlyHint nor idempotentHint.
        pass_env: names of environment variables that the command gets beside HOME, LOGNAME, PATH, SHELL, TERM, USER.
        headers_env: header -> name of the environment variable with its value, for the address.
        start_timeout: time limit for starting the command, or reaching the address, in seconds.
    """

    command: Texts | None = None
    url: str | None = None
    tools: Texts | None = None
    prefix: str = Field(default="", pattern=r"^[\w-]*$")
    session: Literal["shared", "trajectory"] = "shared"
    allow_repeated_calls: bool = False
    pass_env: list[str] = Field(default_factory=list)
    headers_env: dict[str, str] = Field(default_factory=dict)
    start_timeout: float = Field(default=60, gt=0)

    def __post_init__(self):
        if (self.command is None) == (self.url is None):
            raise ValueError(f"command or url: expected one of them, got {self.command} and {self.url}")
        if self.command is not None and shutil.which(self.command[0]) is None:
            raise ValueError(f"command: there is no program {self.command[0]}")
        # No message has a variable's value.
        for key, names in {"pass_env": self.pass_env, "headers_env": self.headers_env.values()}.items():
            for name in names:
                if name not in os.environ:
                    raise ValueError(f"{key}: the environment variable {name} is not set")
                if key != "pass_env" and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", os.environ[name]):
                    raise ValueError(f"{key}: the value of the environment variable {name} cannot be sent in a header")
        for header in self.headers_env:
            if not re.fullmatch(r"[\w-]+", header, re.ASCII):
                raise ValueError(f"headers_env.{header}: no name of a header")
        if self.headers_env and self.command is not None:
            raise ValueError("headers_env is for a server with url; name the variables of a command in pass_env")
        if self.url is not None:
            address = checked_url(self.url, "url")
            if address.scheme != "https" and not is_loopback(address) and self.headers_env:
                raise ValueError(f"url must be https, since it is sent the values of variables, got {self.url!r}")

    def headers(self) -> dict[str, str]:
        """Return the headers that the environment variables hold."""
        return {name: os.environ[variable] for name, variable in self.headers_env.items()}


class MCPTool(ToolSet):
    """The tools of an MCP server; `params` are the keys of `MCPKeys`."""

    def __init__(self, **params: Any):
        keys = read_keys(MCPKeys, params, "params")
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
            result_in_thread(connection.close())
        chosen = keys.tools or list(offered)
        group = _tag_of(chosen[0], keys.prefix)
        self.tools = [MCPFunction(connection, offered[name], keys, group) for name in chosen]

    @classmethod
    def check(cls, **params: Any) -> None:
        read_keys(MCPKeys, params, "params")

    @classmethod
    def tags(cls, **params: Any) -> list[str]:
        """Return the tags; without `tools`, start or reach the server and ask it for them."""
        if (keys := read_keys(MCPKeys, params, "params")).tools:
            return [_tag_of(name, keys.prefix) for name in keys.tools]
        made = cls(**params)
        result_in_thread(made.tools[0].close())
        return [tool.trigger_tag for tool in made.tools]


class MCPFunction(BaseTool):
    """One tool of an MCP server; with `session: trajectory` the connection is only for the trial."""

    argument = None

    def __init__(self, connection: McpConnection, tool: Tool, keys: MCPKeys, group: str):
        self.name = self.trigger_tag = _tag_of(tool.name, keys.prefix)
        self.schema = tool.input_schema
        self.summary = one_line(tool.description or "", MAX_DESCRIPTION_CHARS)
        self.has_session = keys.session == "trajectory"
        hints = tool.annotations
        says_so = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        self.may_repeat = says_so or keys.allow_repeated_calls or not self.has_session
        self.calls_at_once = CALLS_AT_ONCE["http" if keys.command is None else "stdio"]
        self.group = group
        self._connection, self._server, self._tool_name = connection, connection.server, tool.name

    async def start(self, *, timeout: float) -> None:
        try:
            await self._server.run(self._connection.client())
        except OpeningError as error:
            raise ToolError(str(error), kind="unreachable", retry=True) from error

    async def execute(self, content: str, *, timeout: float) -> str:
        return await self.execute_in(self._connection, content, timeout=timeout)

    def new_session(self) -> McpConnection:
        return McpConnection(self._server, reopens=False)

    async def execute_in(self, session: ToolSession, content: str, *, timeout: float) -> str:
        assert isinstance(session, McpConnection)
        return await self._server.run(self._call(session, call_arguments(self.schema, content)))

    async def close(self) -> None:
        await self._server.stop()

    async def _call(self, connection: McpConnection, arguments: dict) -> str:
        """Call the tool and return its text; it runs in the server's thread."""
        try:
            client = await connection.client()
            result = await client.call_tool(self._tool_name, arguments)
        except ConnectionLost:
            message = f"{self.name}: the session has ended, and what its calls left behind is lost"
            raise ToolError(message, kind="session_lost", retry=False, own_fault=True) from None
        except OpeningError as error:
            raise ToolError(f"{self.name}: its server cannot be reached", kind="unreachable", retry=True) from error
        except MCPError as error:
            if error.code == INVALID_REQUEST:  # a server no longer knows the session
                connection.drop(client)
            raise self._protocol_error(connection, error) from error
        except (ValueError, RuntimeError) as error:  # a result of another form
            message = f"{self.name} sent an unreadable reply"
            raise ToolError(message, kind="bad_reply", retry=False, own_fault=True) from error
        if result.is_error:
            message = one_line(result_text(result), MAX_MESSAGE_CHARS) or f"{self.name} failed"
            raise ToolError(message, kind="tool_error", retry=False)
        return result_text(result)

    def _protocol_error(self, connection: McpConnection, error: MCPError) -> ToolError:
        """Return the failure of a call that was answered with an error, or whose connection has ended."""
        if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):
            message = f"{self.name}: the connection to its server has ended"
            # The call may have taken effect. Where there is state, a second one would be one too many.
            return ToolError(message, kind="cut_off", retry=connection.reopens, own_fault=True)
        message = one_line(f"{self.name} failed: {error.message}", MAX_MESSAGE_CHARS)
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


def _tag_of(name: str, prefix: str) -> str:
    """Return the tag of a tool's name, which may have dots and slashes."""
    return re.sub(r"[^\w-]", "_", f"{prefix}_{name}" if prefix else name)


def _listed(connection: McpConnection, shown: str, seconds: float) -> list[Tool]:
    """Return the tools that a server offers; raise ValueError if it cannot be asked."""
    server = connection.server
    try:
        return result_in_thread(asyncio.wait_for(server.run(connection.list_tools()), 2 * seconds))
    except asyncio.TimeoutError:
        reason = f"no list of tools in {2 * seconds:g} seconds"
    except (OpeningError, MCPError, ValueError) as error:
        reason = reason_of(error)
    result_in_thread(server.stop())
    raise ValueError(f"the MCP server {shown} does not work: {reason}")
