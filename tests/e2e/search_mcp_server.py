"""The made task's search as an MCP server, over stdin and stdout: python search_mcp_server.py CORPUS."""

import json
import sys
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("corpus")
TEXTS = {row["title"]: row["text"] for row in map(json.loads, Path(sys.argv[1]).read_text().splitlines())}


@server.tool()
def search(query: str) -> str:
    """Finds a person."""
    if query not in TEXTS:
        raise LookupError(f"nobody is called {query}")
    return f"[1] {query}\n{TEXTS[query]}"


server.run()
