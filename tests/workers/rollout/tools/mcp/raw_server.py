"""An MCP server without the package `mcp`, with faults that the package would not have: python raw_server.py.

It answers one request after the other and, as servers in TypeScript do, writes a reply's id last. `measure` has an
output schema and answers with text only; `fail` exits or hangs.
"""

import json
import os
import subprocess
import sys
import time

ANY = {"type": "object"}
TOOLS = [
    {"name": "measure", "inputSchema": ANY, "outputSchema": {"type": "object", "required": ["meters"]}},
    *({"name": name, "inputSchema": ANY} for name in ("wait", "fail")),
]
SERVER = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "raw", "version": "1"}}


def start_children() -> None:
    """Start two processes that hold the standard output open, one of them in a session of its own."""
    for own_session in (False, True):
        sleeps = "import time; time.sleep(300)  # started by raw_server.py"
        subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=own_session)


def result(name: str, arguments: dict) -> dict:
    if name == "wait":
        time.sleep(arguments["seconds"])
    if name == "fail":
        start_children()
        time.sleep(arguments["seconds"])
        os._exit(3)
    return {"content": [{"type": "text", "text": "3 meters"}]}


def outcome(method: str, params: dict) -> dict:
    if method == "initialize":
        return {"result": SERVER}
    if method == "tools/list":
        return {"result": {"tools": TOOLS}}
    if method == "tools/call":
        return {"result": result(params["name"], params["arguments"])}
    return {"error": {"code": -32601, "message": "no such method"}}


if os.environ.get("HANG"):
    start_children()
    time.sleep(300)
for request in map(json.loads, sys.stdin):
    params = request.get("params") or {}
    if "id" not in request:
        continue
    print(json.dumps(outcome(request["method"], params) | {"jsonrpc": "2.0", "id": request["id"]}), flush=True)
