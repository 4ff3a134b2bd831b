"""An MCP server with state and an unusual result: python odd_server.py [PORT], by stdio or HTTP."""

import sys
from collections import Counter

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import CallToolResult, ResourceLink, ToolAnnotations

server = MCPServer("odd")
counts: Counter[str] = Counter()  # session -> number
queries: list[str] = []


def session_of(ctx: Context) -> str:
    return (ctx.headers or {}).get("mcp-session-id", "")


@server.tool(annotations=ToolAnnotations(idempotentHint=True))
async def add(number: int, ctx: Context) -> str:
    counts[session_of(ctx)] += number
    return str(counts[session_of(ctx)])


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
async def total(ctx: Context) -> str:
    return str(counts[session_of(ctx)])


@server.tool(annotations=ToolAnnotations(idempotentHint=True))
async def search(query: str) -> str:
    queries.append(query)
    return " ".join(queries)


@server.tool()
async def wait(seconds: float) -> str:
    await anyio.sleep(seconds)
    return f"waited {seconds}"


@server.tool()
async def link() -> CallToolResult:
    return CallToolResult(content=[ResourceLink(type="resource_link", name="report", uri="file:///reports/7.txt")])


@server.tool()
async def header(ctx: Context) -> str:
    return (ctx.headers or {}).get("x-api-key", "none")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
