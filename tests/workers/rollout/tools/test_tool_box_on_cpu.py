"""The tool box: limits, retries, failures, and config errors that name the key."""

import asyncio
import contextlib
import logging
import time

import pytest

from verl.workers.config.keys import read_keys
from verl.workers.rollout.tools import tool_box, tool_runners
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError, ToolOutput
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig, try_tools


class Scripted(BaseTool):
    """Does what its list says, one entry a call: a text, an exception, or seconds to sleep."""

    name, trigger_tag = "scripted", "do"

    def __init__(self, script=()):
        self.script, self.running, self.most, self.ended = list(script), 0, 0, 0

    async def execute(self, content, *, timeout):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            step = self.script.pop(0) if self.script else content
            if isinstance(step, (int, float)):
                await asyncio.sleep(step)
                return f"slept {step}"
            if isinstance(step, BaseException):
                raise step
            return step
        finally:
            self.running -= 1
            self.ended += 1


class Answering(Scripted):
    trigger_tag = "answer"


class NoTool:
    pass


def box(script=(), **config) -> ToolBox:
    entry = {"class_path": f"{__name__}.Scripted", "params": {"script": script}}
    return ToolBox(ToolsConfig(tool_instances={"scripted": entry}, **config))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(tool_box, "FIRST_WAIT", 0.001)


def call(made: ToolBox, content="x"):
    return asyncio.run(made.call("do", content))


def test_a_cached_result():
    cached = call(box([ToolOutput("known", cached=True)]))
    assert cached.ok and cached.cached and cached.text == "known" and cached.retries == 0


def test_passing_errors_are_tried_again():
    passing = ToolError("busy", kind="http_503", retry=True)
    result = call(box([passing, passing, "fine"], retry_count=3))
    assert result.ok and result.text == "fine" and result.retries == 2
    result = call(box([passing] * 9, retry_count=3))
    assert not result.ok and result.retries == 3 and result.error == "http_503" and result.text == "Error: busy"
    result = call(box([ToolError("no such page", kind="http_404", retry=False), "fine"]))
    assert not result.ok and result.retries == 0


@pytest.mark.parametrize("nonsense", [None, b"bytes", {7}, ["a list"], ToolOutput(None)])
def test_a_result_that_is_no_text_is_the_tools_fault(nonsense):
    result = call(box([nonsense], timeout=5))
    assert not result.ok and result.own_fault and result.error == "TypeError"
    assert result.text == "Error: scripted failed: TypeError"


@pytest.mark.parametrize("exits", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_tool_that_exits_is_answered_and_so_are_the_calls_after_it(exits):
    made = box([exits, "fine"])
    first, second = call(made), call(made)
    assert not first.ok and first.own_fault and second.ok and second.text == "fine"


def test_a_slow_call_is_given_up_and_ended():
    made = box([5, 5], timeout=0.02, retry_count=1)
    result = call(made)
    tool = made.tools["do"]
    assert result.error == "timeout" and result.retries == 1 and "0.02 seconds" in result.text
    assert tool.running == 0 and tool.ended == 2


def test_a_tools_own_fault_is_told_without_its_details_and_logged_once(caplog):
    made = box([KeyError("/root/secret")] * 3)
    with caplog.at_level(logging.WARNING):
        results = [call(made) for _ in range(3)]
    assert {result.text for result in results} == {"Error: scripted failed: KeyError"}
    assert len([r for r in caplog.records if "scripted failed (KeyError)" in r.getMessage()]) == 1


async def test_no_more_calls_at_once_than_max_workers_and_waiting_does_not_count():
    made = box([0.05] * 6, max_workers=2, timeout=0.2)

    results = await asyncio.gather(*(made.call("do", "x") for _ in range(6)))
    assert made.tools["do"].most == 2 and all(result.ok and result.seconds < 0.14 for result in results)


class Stubborn(Scripted):
    """Blocks its event loop for a time, or goes on when it is cancelled."""

    async def execute(self, content, *, timeout):
        if content == "block":
            time.sleep(1.5)
        elif content == "ignore":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(60)
        return "done"


@pytest.mark.parametrize("content", ["block", "ignore"])
async def test_a_tool_that_blocks_or_ignores_its_cancellation_stops_nobody(content, monkeypatch):
    monkeypatch.setattr(tool_runners, "CANCEL_SECONDS", 0.2)
    entries = {name: {"class_path": f"{__name__}.{name}"} for name in ("Scripted", "Stubborn")}
    monkeypatch.setattr(Stubborn, "trigger_tag", "stubborn")
    made = ToolBox(ToolsConfig(tool_instances=entries, timeout=0.3, retry_count=0))

    started = time.monotonic()
    slow = asyncio.create_task(made.call("stubborn", content))
    quick = await made.call("do", "x")
    quick_seconds = time.monotonic() - started
    slow, slow_seconds = await slow, time.monotonic() - started
    assert (await made.call("stubborn", "x")).text == "done", "the calls after it are answered"
    assert quick.text == "x" and quick_seconds < 0.25
    assert slow.error == "timeout" and slow.own_fault and slow_seconds < 1.2


def test_the_calls_after_one_that_ends_its_thread_are_answered(monkeypatch):
    made = box(timeout=0.3, retry_count=0)
    tool = made.tools["do"]

    async def execute(text, *, timeout):
        if text == "exit in a task":
            await asyncio.create_task(exiting())
        return "fine"

    async def exiting():
        raise SystemExit(3)

    monkeypatch.setattr(tool, "execute", execute)
    first, second = call(made, "exit in a task"), call(made, "x")
    assert not first.ok and first.own_fault and second.text == "fine"


def test_a_close_that_fails_hides_nothing(monkeypatch, caplog):
    async def start(self, *, timeout):
        raise ToolError("the server refuses the connection", kind="refused", retry=False)

    async def close(self):
        raise AttributeError("no session")

    monkeypatch.setattr(Scripted, "start", start)
    monkeypatch.setattr(Scripted, "close", close)
    refused = pytest.raises(ValueError, match="its calls would fail: the server refuses the connection")
    with caplog.at_level(logging.WARNING), refused:
        try_tools(box().config)
    assert "did not end what it has started: AttributeError" in caplog.text


def test_a_tool_that_hangs_at_its_start_is_refused(monkeypatch):
    monkeypatch.setattr(tool_box, "START_SECONDS", 0.2)
    monkeypatch.setattr(Scripted, "start", lambda self, *, timeout: asyncio.sleep(60))
    with pytest.raises(ValueError, match="tool_instances.scripted: its calls would fail: no answer in 0.2 seconds"):
        try_tools(box(timeout=0.1).config)


async def test_cancelling_ends_the_call():
    made = box([5])

    task = asyncio.create_task(made.call("do", "x"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.tools["do"].running == 0


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"class_path": "no.such.Tool"}, "tool_instances.t.class_path=no.such.Tool"),
        ({"class_path": f"{__name__}.Absent"}, "class_path"),
        ({"class_path": f"{__name__}.NoTool"}, "is no BaseTool"),
        ({"class_path": f"{__name__}.Scripted", "params": {"scrpt": []}}, "tool_instances.t.params.*scrpt"),
        ({"params": {}}, "tool_instances.t: expected class_path"),
        ({"class_path": f"{__name__}.Scripted", "parms": {}}, "tool_instances.t: expected class_path and params"),
    ],
)
def test_a_wrong_entry_names_its_key(entry, named):
    with pytest.raises(ValueError, match=named):
        ToolsConfig(tool_instances={"t": entry})


@pytest.mark.parametrize("key", ["call_limit", "max_workers", "timeout", "retry_count", "max_result_tokens"])
def test_a_wrong_number_names_its_key(key):
    with pytest.raises(ValueError, match=f"rollout.tools.{key}=-1"):
        read_keys(ToolsConfig, {key: -1}, "actor_rollout_ref.rollout.tools")


def test_without_fail_on_error_a_broken_tool_is_left_out(caplog):
    good = {"class_path": f"{__name__}.Scripted"}
    made = ToolBox(ToolsConfig(tool_instances={"bad": {"class_path": "no.such.Tool"}, "t": good}, fail_on_error=False))
    assert list(made.tools) == ["do"] and "bad is left out" in caplog.text
    with pytest.raises(ValueError, match="no tool that can be loaded"):
        ToolBox(ToolsConfig(tool_instances={"bad": {"class_path": "no.such.Tool"}}, fail_on_error=False))


def test_null_leaves_a_tool_out_and_tags_that_are_taken_are_refused():
    entry = {"class_path": f"{__name__}.Scripted"}
    assert list(ToolBox(ToolsConfig(tool_instances={"a": entry, "search": None})).tools) == ["do"]
    with pytest.raises(ValueError, match="<answer> belongs to the protocol"):
        ToolBox(ToolsConfig(tool_instances={"a": {"class_path": f"{__name__}.Answering"}}))
    with pytest.raises(ValueError, match="a second tool for <do>"):
        ToolBox(ToolsConfig(tool_instances={"a": entry, "b": entry}))


def test_a_tool_shows_that_it_works_before_a_run_begins(caplog, monkeypatch):
    def starting(script, **config):
        return box(script, **config).config

    monkeypatch.setattr(Scripted, "start", lambda self, *, timeout: self.execute("", timeout=timeout))
    busy = ToolError("busy", kind="http_503", retry=True)
    try_tools(starting([busy, "fine"]))
    broken = starting([ToolError("no namespaces", kind="sandbox", retry=False)])
    with pytest.raises(ValueError, match="tool_instances.scripted: its calls would fail: no namespaces"):
        try_tools(broken)
    with pytest.raises(ValueError, match="busy"):
        try_tools(starting([busy] * 4, retry_count=3))
    try_tools(starting([busy], retry_count=0, fail_on_error=False))
    assert "its calls would fail: busy" in caplog.text

    async def where_a_loop_runs():
        try_tools(starting(["fine"]))

    asyncio.run(where_a_loop_runs())


@pytest.mark.parametrize(
    "step, own_fault",
    [
        (ToolError("no dice", kind="bad_number", retry=False), False),
        (ToolError("down", kind="unreachable", retry=True), True),
        (ToolError("no key", kind="http_401", retry=False, own_fault=True), True),
        (ZeroDivisionError(), True),
        (9, True),
        ("fine", False),
    ],
)
def test_passing_and_unknown_errors_are_the_tools_own_fault(step, own_fault):
    assert call(box([step], retry_count=0, timeout=0.05)).own_fault == own_fault
