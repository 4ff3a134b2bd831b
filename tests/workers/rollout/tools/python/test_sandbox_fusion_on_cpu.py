"""The python tool on a Sandbox Fusion server: a real HTTP server that answers in the form of ByteDance's and runs what
it gets with this interpreter, or misbehaves."""

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.python.tool import PythonTool


def run_code(request):
    """What the server answers: the program in a fresh interpreter, as its python runner does."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", request["code"]],
            capture_output=True,
            text=True,
            timeout=request["run_timeout"],
        )
    except subprocess.TimeoutExpired as error:
        result = {"status": "TimeLimitExceeded", "stdout": (error.stdout or b"").decode(), "stderr": None}
        return {"status": "Failed", "compile_result": None, "run_result": result | {"return_code": None}}
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return {"status": "Failed" if done.returncode else "Success", "compile_result": None, "run_result": result}


class Server(ThreadingHTTPServer):
    """Answers with `reply(request)`; keeps paths, requests, and how many ran at once at most."""

    request_queue_size = 128  # with the default of 5, a busy machine resets connections that come at once

    def __init__(self, reply=run_code, status=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.status = reply, status
        self.paths, self.requests, self.running, self.most = [], [], 0, 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        with server.lock:
            server.paths.append(self.path)
            server.requests.append(request)
            server.running += 1
            server.most = max(server.most, server.running)
        body = server.reply(request)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        with server.lock:
            server.running -= 1
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        return


@pytest.fixture
def serve():
    servers = []

    def start(*args):
        servers.append(Server(*args))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def call(url, *programs, timeout=60, **params):
    """(text, kind of error or None, whether it may be tried again) of programs at once."""

    async def call_tool(tool, program):
        try:
            return await tool.execute(textwrap.dedent(program), timeout=timeout), None, False
        except ToolError as error:
            return str(error), error.kind, error.retry

    async def calls():
        tool = PythonTool(sandbox_fusion_url=url, **params)
        try:
            return await asyncio.gather(*(call_tool(tool, program) for program in programs))
        finally:
            await tool.close()

    return asyncio.run(calls())


SAME = [
    "",
    "x = 1",
    "print(1)\n'a'\n[1, 'é', '中', '😀']",
    "import sys\nprint('o')\nprint('e', file=sys.stderr)\nprint('o')",
    "print('a')\nraise SystemExit('bye')",
    "import os\nos.write(1, b'x')\nos._exit(3)",
    "```python\nprint(1)\n```",
    "    x = 1\n    x + 1",
    "__name__",
    "'\\ud800'",
    "def f(x):\n    return 1 / x\nprint(1)\nf(0)",
    "x = (",
    "import atexit, time; atexit.register(time.sleep, 60); print(1)",
    "quotes = '''\"'''; print(quotes, '\\\\', '{}')",
    "raise MemoryError",
    "import os; os.abort()",
]


@pytest.mark.slow
def test_the_model_reads_the_same_as_of_a_local_sandbox(serve):
    server = serve()
    assert call(server.url, *SAME) == call(None, *SAME)
    assert set(server.paths) == {"/run_code"}


def test_the_request(serve):
    server = serve()
    assert call(server.url + "/run_code", "6 * 7", timeout=10, memory_mb=333) == [("42\n", None, False)]
    request = server.requests[0]
    assert server.paths == ["/run_code"] and "6 * 7" in request["code"]
    assert request["language"] == "python" and request["memory_limit_MB"] == 333
    assert 9 < request["run_timeout"] <= 9.5 and request["stdin"] is None
    call(server.url + "/v1/", "1")
    assert server.paths[-1] == "/v1/run_code"


def test_a_timeout_tells_what_was_printed(serve):
    program = "print('so far')\nimport time\ntime.sleep(60)"
    ((text, kind, retry),) = call(serve().url, program, timeout=4)
    assert (kind, retry) == ("timeout", False) and "4 seconds" in text and text.endswith("so far\n")


def test_requests_at_once(serve):
    server = serve(lambda request: time.sleep(0.1) or finished())
    call(server.url, *8 * ["1"], num_workers=2)
    assert server.most == 2 and len(server.requests) == 8


def finished(**changes):
    return {
        "status": "Success",
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""} | changes,
    }


FAULTS = {
    "fault of its own": ({"status": "SandboxError", "message": "no runner", "run_result": None}, 200, "sandbox", True),
    "a run that failed": (finished(status="Error"), 200, "sandbox", True),
    "no JSON": (b"<html>", 200, "bad_reply", True),
    "another form": (["Success"], 200, "bad_reply", True),
    "output that is no text": (finished(stdout=7), 200, "bad_reply", True),
    "refused": ({}, 422, "http_422", False),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_server(serve, name):
    reply, status, kind, retry = FAULTS[name]
    server = serve(lambda request: reply, status)
    ((text, *error),) = call(server.url, "1")
    assert error == [kind, retry] and "Sandbox Fusion server" in text and "127.0.0.1" not in text
