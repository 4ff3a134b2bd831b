"""MCP servers as they are: with state, slow, with faults, and with everything that a schema or a result may hold."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.workers.rollout.tools.mcp.test_tool_on_cpu import CLASS, COMMAND, box, call, calls, config, http_server
from verl.evaluation.model.server import free_port
from verl.utils.fault_reports import RunError
from verl.workers.rollout.stateful import InstanceKeys, InstancePool
from verl.workers.rollout.tools.environment import ToolSessions
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig, try_tools

pytestmark = pytest.mark.slow

RAW = [sys.executable, str(Path(__file__).with_name("raw_server.py"))]
STATE = ["count", "total"]


@contextlib.contextmanager
def over_http() -> Iterator[dict]:
    """Parameters of a server that answers over HTTP."""
    port = free_port()
    with http_server(port):
        yield {"url": f"http://127.0.0.1:{port}/mcp"}


@pytest.fixture(scope="module", params=["stdio", "http"])
def server(request) -> Iterator[dict]:
    if request.param == "stdio":
        yield {"command": COMMAND}
        return
    with over_http() as params:
        yield params


# ---- sessions ----


@contextlib.asynccontextmanager
async def sessions_of(params: dict, max_instances: int = 64) -> AsyncIterator[ToolSessions]:
    made = ToolBox(config(params))
    sessions = ToolSessions(made, InstancePool(InstanceKeys(max_instances=max_instances)))
    try:
        yield sessions
    finally:
        await sessions.close()
        await made.close()


async def answers(sessions: ToolSessions, *calls: tuple[str, str]) -> list[str]:
    """The texts of a trajectory's calls, each a tag and a text."""
    states, texts = None, []
    for tag, content in calls:
        outcome, states = await sessions.call(states, tag, content)
        texts.append(outcome.text)
    return texts


def test_each_trajectory_has_a_connection_that_all_tools_of_the_server_share(server):
    made = [("count", '{"number": 2}'), ("count", '{"number": 3}'), ("total", "")]

    async def two_trajectories(**params):
        async with sessions_of(server | {"tools": STATE} | params) as sessions:
            return await asyncio.gather(answers(sessions, *made), answers(sessions, *made))

    assert asyncio.run(two_trajectories(session="trajectory")) == [["2", "5", "5"]] * 2
    shared = asyncio.run(two_trajectories())
    assert max(int(texts[-1]) for texts in shared) == 10, "by default the connection is shared"


@pytest.mark.parametrize("max_instances", [1, 64])
async def test_a_branch_gets_a_new_connection_in_which_the_calls_are_made_again(max_instances):
    params = {"command": COMMAND, "tools": ["remember"], "session": "trajectory"}
    async with sessions_of(params, max_instances) as sessions:
        _, states = await sessions.call(None, "remember", "a")
        branches = [await sessions.call(states, "remember", query) for query in "bcd"]
        texts = [(await sessions.call(after, "remember", "e"))[0].text for _, after in branches]
    assert [call.text for call, _ in branches] == ["a b", "a c", "a d"] and texts == ["a b e", "a c e", "a d e"]
    assert sessions.metrics()["environment/replays"] >= 2


def test_a_tree_that_repeats_calls_needs_the_servers_word_or_the_users():
    once = {"command": COMMAND, "session": "trajectory", "tools": ["count", "wait"]}
    with pytest.raises(ValueError, match="rollout.tree=arpo .* server of wait says .*params.allow_repeated_calls=true"):
        try_tools(config(once), "arpo")
    for params, tree in (
        (once, "plain"),
        (once | {"allow_repeated_calls": True}, "arpo"),
        (once | {"tools": STATE}, "arpo"),
        (once | {"session": "shared"}, "arpo"),
    ):
        try_tools(config(params), tree)


async def test_a_session_without_its_place_is_not_brought_back_by_calls_that_must_be_made_once():
    async with sessions_of({"command": COMMAND, "session": "trajectory"}, max_instances=1) as sessions:
        _, states = await sessions.call(None, "wait", "0")
        _, states = await sessions.call(states, "total", "")
        await sessions.call(None, "total", "")
        with pytest.raises(RunError, match="wait had been called was closed .* raise environment.max_instances=1 "):
            await sessions.call(states, "total", "")


async def test_a_session_that_has_ended_is_not_replaced_by_an_empty_one():
    async with sessions_of({"command": COMMAND, "session": "trajectory"}) as sessions:
        _, states = await sessions.call(None, "count", '{"number": 2}')
        ended, states = await sessions.call(states, "search", "exit")
        after, _ = await sessions.call(states, "total", "")
        other, _ = await sessions.call(None, "total", "")
    assert ended.error == "cut_off"
    assert after.text == "Error: total: the session has ended, and what its calls left behind is lost"
    assert after.own_fault and other.text == "0"


# ---- limits ----


def test_a_call_that_waits_for_its_connection_takes_no_time():
    """The server takes 8 seconds for 16 calls."""
    with box({"command": RAW}, timeout=4) as made:
        outcomes = calls(made, *['{"seconds": 0.5}'] * 16, tag="wait")
    assert all(outcome.ok and outcome.seconds < 2 for outcome in outcomes)


def test_an_address_has_several_calls_at_once():
    with over_http() as params, box(params) as made:
        started = time.monotonic()
        calls(made, *['{"seconds": 1}'] * 8, tag="wait")
        assert time.monotonic() - started < 4


# ---- what the model reads ----


@pytest.mark.parametrize(
    ("command", "tag", "text"), [(COMMAND, "link", "report: file:///reports/7.txt"), (RAW, "measure", "3 meters")]
)
def test_a_link_is_its_name_and_address_and_a_text_need_not_fit_the_output_schema(command, tag, text):
    with box({"command": command, "tools": [tag]}) as made:
        outcome = call(made, "", tag)
    assert (outcome.text, outcome.ok) == (text, True)


# ---- the config ----


def test_two_servers_with_the_same_tools_have_tags_of_their_own():
    entries = {
        name: {"class_path": CLASS, "params": {"command": COMMAND, "tools": ["total"]} | params}
        for name, params in (("a", {}), ("b", {"prefix": "left"}), ("c", {"prefix": "right"}))
    }
    made = ToolBox(ToolsConfig(tool_instances=entries))
    assert list(made.tools) == ["total", "left_total", "right_total"]
    assert call(made, "", "right_total").text == "0"
    asyncio.run(made.close())
    with pytest.raises(ValueError, match="tool_instances.b: a second tool for <total>; .* by params.prefix"):
        ToolBox(ToolsConfig(tool_instances={"a": entries["a"], "b": entries["a"]}))


def test_headers_have_their_values_from_the_environment(monkeypatch):
    monkeypatch.setenv("LIBRARY_KEY", "s3cret")
    with over_http() as params:
        with box(params | {"headers_env": {"X-Api-Key": "LIBRARY_KEY"}}) as made:
            assert call(made, "", "header").text == "s3cret"
    monkeypatch.setenv("LIBRARY_KEY", "s3cret\nX-Other: 1")
    with pytest.raises(ValueError, match="headers_env: the value of .* LIBRARY_KEY cannot be sent") as caught:
        config(params | {"headers_env": {"X-Api-Key": "LIBRARY_KEY"}})
    assert "s3cret" not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


# ---- faults ----


def processes() -> set[int]:
    """The processes of raw_server.py, and those that it has started."""
    pids = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"raw_server.py" in file.read_bytes():
                pids.add(int(file.parent.name))
    return pids


@pytest.mark.parametrize("seconds", [0, 300])
def test_a_server_that_exits_or_hangs_in_a_call_leaves_no_children(seconds):
    """Also one that exits is noticed by the time limit alone, as its children hold its standard output."""
    before = processes()
    with box({"command": RAW}, timeout=6, retry_count=0) as made:
        outcome = call(made, json.dumps({"seconds": seconds}), "fail")
        assert outcome.error == "timeout" and outcome.own_fault and outcome.seconds < 9
        assert len(processes() - before) == (2 if seconds == 0 else 3)
    assert processes() <= before


def test_a_server_that_hangs_at_its_start_leaves_no_children(monkeypatch):
    monkeypatch.setenv("HANG", "1")
    before, started = processes(), time.monotonic()
    with pytest.raises(ValueError, match="does not work: no answer in 3 seconds"):
        try_tools(config({"command": RAW, "pass_env": ["HANG"], "start_timeout": 3}))
    assert time.monotonic() - started < 15 and processes() <= before
