"""The python tool on a Sandbox Fusion server: a real HTTP server that answers in the form of ByteDance's and runs what
it gets with this interpreter, or misbehaves."""

import asyncio
import subprocess
import sys
import textwrap
import time

import pytest

from tests.workers.rollout.tools.http_server import Server
from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.python.tool import PythonTool


def run_code(request):
    """Run the program in a fresh interpreter, like the server's python runner, and return the server's answer."""
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
    "x = 1",
    "print(1)\n'a'\n[1, 'é', '中', '😀']",
    "import sys\nprint('o')\nprint('e', file=sys.stderr)\nprint('o')",
    "print('a')\nraise SystemExit('bye')",
    "import os\nos.write(1, b'x')\nos._exit(3)",
    "```python\n    x = 1\n    x + 1\n```",
    "__name__",
    "'\\ud800'",
    "def f(x):\n    return 1 / x\nprint(1)\nf(0)",
    "x = (",
    "import atexit, time; atexit.register(time.sleep, 60); print(1)",
    "quotes = '''\"'''; print(quotes, '\\\\', '{}')",
    "import os; os.abort()",
]


@pytest.mark.slow
def test_the_model_reads_the_same_as_of_a_local_sandbox():
    with Server(run_code) as server:
        assert call(server.url, *SAME) == call(None, *SAME)
    assert set(server.paths) == {"/run_code"}


def test_the_request():
    with Server(run_code) as server:
        assert call(server.url + "/run_code", "6 * 7", timeout=10, memory_mb=333) == [("42\n", None, False)]
        call(server.url + "/v1/", "1")
    request = server.requests[0]
    assert server.paths == ["/run_code", "/v1/run_code"] and "6 * 7" in request["code"]
    assert request["language"] == "python" and request["memory_limit_MB"] == 333
    assert 9 < request["run_timeout"] <= 9.5 and request["stdin"] is None


def test_a_timeout_tells_what_was_printed():
    program = "print('so far')\nimport time\ntime.sleep(60)"
    with Server(run_code) as server:
        ((text, kind, retry),) = call(server.url, program, timeout=4)
    assert (kind, retry) == ("timeout", False) and "4 seconds" in text and text.endswith("so far\n")


def finished(**changes):
    result = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""} | changes
    return {"status": "Success", "run_result": result}


def test_requests_at_once():
    with Server(lambda request: time.sleep(0.1) or finished()) as server:
        call(server.url, *8 * ["1"], num_workers=2)
    assert server.most == 2 and len(server.requests) == 8


@pytest.mark.parametrize(
    ("reply", "status", "kind", "retry"),
    [
        ({"status": "SandboxError", "message": "no runner", "run_result": None}, 200, "sandbox", True),
        (finished(status="Error"), 200, "sandbox", True),
        (b"<html>", 200, "bad_reply", True),
        (["Success"], 200, "bad_reply", True),
        (finished(stdout=7), 200, "bad_reply", True),
        ({}, 422, "http_422", False),
    ],
)
def test_a_faulty_server(reply, status, kind, retry):
    with Server(lambda request: reply, status) as server:
        ((text, *error),) = call(server.url, "1")
    assert error == [kind, retry] and "Sandbox Fusion server" in text and "127.0.0.1" not in text
