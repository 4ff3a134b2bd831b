"""MCP tools with real servers (mcp_library.py) in processes of their own, by stdio and by streamable HTTP."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipe.arpo.toy_agent import TOKENIZER
from tests.workers.rollout.gym.test_process_on_cpu import is_running
from tests.workers.rollout.tools.http_server import Server
from tests.workers.rollout.tools.mcp.mcp_library import HOSTILE
from verl.evaluation.model.server import free_port
from verl.workers.rollout.tools import tool_box
from verl.workers.rollout.tools.mcp.connections import MARK
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig, tool_class, try_tools

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("mcp_library.py")
COMMAND = [sys.executable, str(SERVER)]
TAGS = ["search", "add", "who_am-i", "picture", "count", "total", "remember", "wait", "link", "header"]
CLASS = "verl.workers.rollout.tools.mcp.tool.MCPTool"
LOOP = asyncio.new_event_loop()  # places for calls belong to one event loop, as in a rollout worker


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(tool_box, "FIRST_WAIT", 0.05)


def config(params: dict, **keys) -> ToolsConfig:
    return ToolsConfig(tool_instances={"library": {"class_path": CLASS, "params": params}}, **keys)


@contextlib.contextmanager
def box(params: dict, **keys) -> Iterator[ToolBox]:
    made = ToolBox(config(params, **keys))
    try:
        yield made
    finally:
        LOOP.run_until_complete(made.close())


def calls(made: ToolBox, *contents: str, tag: str = "search"):
    """The calls of a tool, all at once."""

    async def gathered():
        return await asyncio.gather(*(made.call(tag, content) for content in contents))

    return LOOP.run_until_complete(gathered())


def call(made: ToolBox, content: str, tag: str = "search"):
    return calls(made, content, tag=tag)[0]


def pid_of(made: ToolBox) -> int:
    return json.loads(call(made, "", "who_am-i").text)["pid"]


@contextlib.contextmanager
def http_server(port: int, *options: str) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([*COMMAND, str(port), *options], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["stdio", "events", "json"])
def server(request) -> Iterator[dict]:
    """Parameters that name the server: a command, or an address that answers with events or with JSON."""
    if request.param == "stdio":
        yield {"command": COMMAND}
        return
    port = free_port()
    with http_server(port, *(["json"] if request.param == "json" else [])):
        yield {"url": f"http://127.0.0.1:{port}/mcp"}


# ---- calls ----


def test_the_servers_tools_are_listed_and_called(server):
    with box(server) as made:
        assert list(made.tools) == TAGS
        LOOP.run_until_complete(made.start())
        texts = {content: call(made, content).text for content in ("otters", '{"query": "Paris"}', "print")}
        assert texts == {"otters": "about otters", '{"query": "Paris"}': "about Paris", "print": "about print"}
        assert call(made, '{"a": 2, "b": 3}', "add").text == "5"
        assert call(made, "", "picture").text == "[image left out]"
        replies = calls(made, *(f"q{i}" for i in range(64)))
        assert [reply.text for reply in replies] == [f"about q{i}" for i in range(64)]


def test_errors_say_whose_fault_they_are(server):
    with box(server, retry_count=0) as made:
        wrong = call(made, '{"a": "two", "b": 3}', "add")
        assert not wrong.ok and not wrong.own_fault and "valid integer" in wrong.text
        failed = call(made, "bad")
        assert (failed.error, failed.own_fault) == ("tool_error", False) and "no such book" in failed.text
        refused = call(made, "protocol")
        assert (refused.error, refused.own_fault) == ("protocol_error", True)
        assert refused.text == "Error: search failed: the catalog is closed"
        assert call(made, "three", "add").error == "bad_arguments"
        assert call(made, "fine").ok


def test_slow_and_huge_results_are_failures_of_their_own_call_only(server):
    with box(server, timeout=5, retry_count=0) as made:
        replies = calls(made, *(f"q{i}" for i in range(8)), "slow", *(["huge"] if "url" in server else []))
        assert [reply.text for reply in replies[:8]] == [f"about q{i}" for i in range(8)]
        slow, *huge = replies[8:]
        assert all(not reply.ok and reply.own_fault and len(reply.text) < 300 for reply in huge)
        assert slow.text == "Error: search gave no answer in 5 seconds" and slow.own_fault
        assert call(made, "fine").ok


def test_the_config_chooses_among_the_servers_tools(server):
    with box(server | {"tools": ["add", "who.am-i"]}) as made:
        assert list(made.tools) == ["add", "who_am-i"]
    with pytest.raises(ValueError, match="tools: the MCP server .* offers add, count, .*, who.am-i, got serch"):
        ToolBox(config(server | {"tools": ["serch"]}))
    cls, params = tool_class("library", {"class_path": CLASS, "params": server | {"tools": ["who.am-i"]}})
    assert cls.tags(**params) == ["who_am-i"]
    assert cls.tags(**server) == TAGS


def test_hostile_results_are_harmless(server):
    with box(server) as made:
        protocol = Protocol(TOKENIZER, list(made.tools))
        text = call(made, "hostile").text
        assert text == HOSTILE
        ids = protocol.result_ids(text, 500)
        assert TOKENIZER.eos_token_id not in ids and protocol.first_call(ids) is None
        assert TOKENIZER.decode(ids).count("</result>") == 1


# ---- a server that ends ----


def test_a_killed_process_is_started_anew():
    with box({"command": COMMAND}) as made:
        first = pid_of(made)
        os.kill(first, signal.SIGKILL)
        replies = calls(made, *(f"q{i}" for i in range(8)))
        assert [reply.text for reply in replies] == [f"about q{i}" for i in range(8)]
        second = pid_of(made)
        assert second != first

        ended = call(made, "exit")
        assert (ended.ok, ended.error, ended.own_fault) == (False, "cut_off", True)
        assert call(made, "fine").ok
        last = pid_of(made)
    assert not any(map(is_running, (first, second, last))), "the process outlives the tool"


def test_a_call_that_waits_for_a_killed_process_ends_at_once(caplog):
    with box({"command": COMMAND}, retry_count=0) as made:
        pid = pid_of(made)
        started = time.perf_counter()
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        assert call(made, "slow").error == "cut_off" and time.perf_counter() - started < 20
        assert call(made, "fine").ok
    assert "a connection to an MCP server has ended: the server's process has ended" in caplog.text


def test_a_killed_http_server_is_reached_again():
    port = free_port()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(http_server(port))
        made = stack.enter_context(box({"url": f"http://127.0.0.1:{port}/mcp"}, retry_count=1))
        assert call(made, "before").ok
        process.kill()
        process.wait()
        down = call(made, "down")
        assert not down.ok and down.own_fault and down.error == "unreachable"
        stack.enter_context(http_server(port))
        assert call(made, "up").text == "about up"


def test_the_run_ends_when_a_server_does_not_come_back(tmp_path):
    """The calls are the tool's own fault, which ends a run in which all calls fail (tree_reports.broken_tools)."""
    copy = tmp_path / "server.py"
    copy.write_text(SERVER.read_text())
    with box({"command": [sys.executable, str(copy)]}, retry_count=1) as made:
        pid = pid_of(made)
        copy.unlink()
        os.kill(pid, signal.SIGKILL)
        replies = calls(made, "a", "b")
        assert {(reply.error, reply.own_fault) for reply in replies} == {("unreachable", True)}
        assert replies[0].text == "Error: search: its server cannot be reached", "neither paths nor tracebacks"


# ---- before a run ----


def test_a_process_gets_named_variables_only(monkeypatch):
    monkeypatch.setenv("BRIGHTDATA_API_KEY", "s3cret")
    monkeypatch.setenv("LIBRARY_CARD", "17")
    with box({"command": COMMAND, "pass_env": ["LIBRARY_CARD"]}) as made:
        names = json.loads(call(made, "", "who_am-i").text)["environment"]
    assert "LIBRARY_CARD" in names and "BRIGHTDATA_API_KEY" not in names
    # Python itself adds LC_CTYPE.
    assert set(names) <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LIBRARY_CARD", "LC_CTYPE", MARK}


def test_a_server_that_does_not_start_is_said_with_its_last_words(monkeypatch):
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(ValueError, match="does not work: the server's process has ended; .*no catalog in /srv/catalog"):
        try_tools(config({"command": COMMAND, "pass_env": ["BROKEN"]}))
    with pytest.raises(ValueError, match="127.0.0.1:1/mcp does not work: .*[Cc]onnect"):
        try_tools(config({"url": "http://127.0.0.1:1/mcp"}))


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (401, b"", "text/plain", "the server refuses access: HTTP status 401"),
        (404, b"", "text/plain", "Not Found"),
        (200, b"<html>", "text/html", "text/html"),
        (200, b"x" * 9_000_000, "application/json", "more than 8000000 bytes"),
    ],
)
def test_an_address_that_is_no_mcp_server_is_said(monkeypatch, status, body, kind, reason):
    monkeypatch.setenv("LIBRARY_KEY", "Bearer s3cret")
    with Server(lambda request: body, status, kind) as server:
        with pytest.raises(ValueError, match=f"does not work: .*{reason}") as caught:
            headers = {"Authorization": "LIBRARY_KEY"}
            try_tools(config({"url": f"{server.url}/mcp", "headers_env": headers, "start_timeout": 10}))
    keys = {headers["Authorization"] for headers in server.headers}
    assert keys == {"Bearer s3cret"} and "s3cret" not in str(caught.value)
