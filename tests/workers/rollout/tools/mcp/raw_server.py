"""An MCP server without the package `mcp`, for replies that the package would not send: python raw_server.py.

As servers in TypeScript do, it writes a reply's id last. `measure` has an output schema and answers with text only.
"""

import json
import sys

STRING = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"name": "measure", "inputSchema": {"type": "object"}, "outputSchema": {"type": "object", "required": ["meters"]}},
    {"name": "huge", "inputSchema": STRING},
]
SERVER = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "raw", "version": "1"}}


def outcome(request: dict) -> dict:
    if request["method"] == "initialize":
        return {"result": SERVER}
    if request["method"] == "tools/list":
        return {"result": {"tools": TOOLS}}
    if request["method"] == "tools/call":
        text = "3 meters" if request["params"]["name"] == "measure" else '"id": 1' + "x" * 10_000_000
        return {"result": {"content": [{"type": "text", "text": text}]}}
    return {"error": {"code": -32601, "message": "no such method"}}


for request in map(json.loads, sys.stdin):
    if "id" in request:
        print(json.dumps(outcome(request) | {"jsonrpc": "2.0", "id": request["id"]}), flush=True)
