"""An MCP server without the package `mcp`, for replies that the package would not send: python raw_server.py.

As servers in TypeScript do, it writes a reply's id last. `measure` has an output schema and answers with text only;
`huge` sends 100 MB in one line.
"""

import json
import sys

NOTHING = {"type": "object"}
TOOLS = [
    {"name": "measure", "inputSchema": NOTHING, "outputSchema": {"type": "object", "required": ["meters"]}},
    {"name": "huge", "inputSchema": NOTHING},
]
SERVER = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "raw", "version": "1"}}


def outcome(request: dict) -> dict:
    if request["method"] == "initialize":
        return {"result": SERVER}
    if request["method"] == "tools/list":
        return {"result": {"tools": TOOLS}}
    if request["method"] == "tools/call":
        return {"result": {"content": [{"type": "text", "text": "3 meters"}]}}
    return {"error": {"code": -32601, "message": "no such method"}}


for request in map(json.loads, sys.stdin):
    if "id" not in request:
        continue
    if request.get("params", {}).get("name") == "huge":
        sys.stdout.write('{"result": {"structuredContent": {"id": 0, "text": "')
        for _ in range(100):
            sys.stdout.write("x" * 1_000_000)
        print(f'"}}, "content": []}}, "jsonrpc": "2.0", "id": {request["id"]}}}', flush=True)
    else:
        print(json.dumps(outcome(request) | {"jsonrpc": "2.0", "id": request["id"]}), flush=True)
