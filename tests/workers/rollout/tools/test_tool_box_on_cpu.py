"""The tool box: limits, retries, failures, and config errors that name the key."""

import asyncio
import contextlib
import json
import logging
import re
import time
from pathlib import Path

import pytest

from tests.workers.rollout.tools.search.animals import ANIMALS, write_jsonl
from verl.workers.config.keys import read_keys
from verl.workers.rollout.tools import tool_box, tool_runners
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError
from verl.workers.rollout.tools.python.tool import PythonTool
from verl.workers.rollout.tools.search.tool import LocalSearchTool
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig, tool_class, try_tools


class Scripted(BaseTool):
    """Does what its list says, one entry a call: a text, an exception, a coroutine function, or seconds to sleep."""

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
            return await step() if callable(step) else step
        finally:
            self.running -= 1
            self.ended += 1


class Answering(Scripted):
    trigger_tag = "answer"


def box(script=(), **config) -> ToolBox:
    entry = {"class_path": f"{__name__}.Scripted", "params": {"script": script}}
    return ToolBox(ToolsConfig(tool_instances={"scripted": entry}, **config))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(tool_box, "FIRST_WAIT", 0.001)


def call(made: ToolBox, content="x"):
    return asyncio.run(made.call("do", content))


def test_passing_errors_are_tried_again():
    passing = ToolError("busy", kind="http_503", retry=True)
    for script, text, attempts in (
        ([passing, passing, "known"], "known", 3),
        ([passing] * 9, "Error: busy", 4),
        ([ToolError("no such page", kind="http_404", retry=False), "fine"], "Error: no such page", 1),
    ):
        made = box(script, retry_count=3)
        result = call(made)
        assert (result.text, result.ok, made.tools["do"].ended) == (text, text == "known", attempts)


@pytest.mark.parametrize("nonsense", [None, b"bytes", {7}, ["a list"]])
def test_a_result_that_is_no_text_is_the_tools_fault(nonsense):
    result = call(box([nonsense], timeout=5))
    assert not result.ok and result.own_fault and result.error == "TypeError"
    assert result.text == "Error: scripted failed: TypeError"


async def exits_in_a_task():
    async def exiting():
        raise SystemExit(3)

    await asyncio.create_task(exiting())


@pytest.mark.parametrize("exits", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), exits_in_a_task])
def test_a_tool_that_exits_is_answered_and_so_are_the_calls_after_it(exits):
    made = box([exits, "fine"], timeout=1, retry_count=0)
    first, second = call(made), call(made)
    assert not first.ok and first.own_fault and second.ok and second.text == "fine"


def test_a_slow_call_is_given_up_and_ended():
    made = box([5, 5], timeout=0.02, retry_count=1)
    result, tool = call(made), made.tools["do"]
    assert (result.error, result.own_fault) == ("timeout", True) and "0.02 seconds" in result.text
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
    quick_seconds, (_, thread) = time.monotonic() - started, made._opened[1]
    loop = thread._loop
    slow, slow_seconds = await slow, time.monotonic() - started
    assert (await made.call("stubborn", "x")).text == "done", "the calls after it are answered"
    assert quick.text == "x" and quick_seconds < 0.25
    assert slow.error == "timeout" and slow.own_fault and slow_seconds < 1.2
    assert (thread._loop is loop) == (content == "ignore")  # locks and processes of the tool belong to its loop


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


async def test_cancelling_ends_the_call():
    made = box([5])

    task = asyncio.create_task(made.call("do", "x"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.tools["do"].running == 0


@pytest.mark.parametrize(
    ("authors", "cls"), [("rollout.tools.python_tool", PythonTool), ("agent.tools.search_tool", LocalSearchTool)]
)
def test_the_authors_modules_are_ours(authors, cls):
    """The modules of the tools in the scripts of arXiv 2507.19849."""
    params = {"corpus": "any"} if cls is LocalSearchTool else {}
    assert tool_class("t", {"class_path": f"verl.workers.{authors}.{cls.__name__}", "params": params})[0] is cls


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tool_instances": {"t": {"params": {}}}}, "tool_instances.t: expected class_path"),
        ({"tool_instances": {"t": {"class_path": "a.B", "parms": {}}}}, "tool_instances.t: expected class_path and"),
        *(({key: -1}, f"{key}=-1") for key in ("call_limit", "max_workers", "timeout", "retry_count")),
    ],
)
def test_a_wrong_value_names_its_key(values, message):
    with pytest.raises(ValueError, match=f"rollout.tools.{message}"):
        read_keys(ToolsConfig, values, "actor_rollout_ref.rollout.tools")


def test_without_fail_on_error_a_broken_tool_is_left_out(caplog):
    good = {"class_path": f"{__name__}.Scripted"}
    made = ToolBox(ToolsConfig(tool_instances={"bad": {"class_path": "no.such.Tool"}, "t": good}, fail_on_error=False))
    assert list(made.tools) == ["do"] and "bad is left out" in caplog.text
    with pytest.raises(ValueError, match="no tool that can be loaded"):
        ToolBox(ToolsConfig(tool_instances={"bad": {"class_path": "no.such.Tool"}}, fail_on_error=False))


def test_null_leaves_a_tool_out_and_tags_that_are_taken_are_refused(monkeypatch):
    closed = []

    async def close(self):
        closed.append(self.trigger_tag)

    monkeypatch.setattr(Scripted, "close", close)
    entry = {"class_path": f"{__name__}.Scripted"}
    assert list(ToolBox(ToolsConfig(tool_instances={"a": entry, "search": None})).tools) == ["do"]
    with pytest.raises(ValueError, match="<answer> belongs to the protocol"):
        ToolBox(ToolsConfig(tool_instances={"a": {"class_path": f"{__name__}.Answering"}}))
    with pytest.raises(ValueError, match="a second tool for <do>"):
        ToolBox(ToolsConfig(tool_instances={"a": entry, "b": entry}))
    assert closed == ["answer", "do", "do"], "what has been made is closed"


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
    monkeypatch.setattr(tool_box, "START_SECONDS", 0.2)
    with pytest.raises(ValueError, match="its calls would fail: no answer in 0.2 seconds"):
        try_tools(starting([60], timeout=0.1))

    async def where_a_loop_runs():
        try_tools(starting(["fine"]))

    asyncio.run(where_a_loop_runs())


@pytest.mark.parametrize(("retry", "own_fault"), [(False, None), (True, None), (False, True)])
def test_passing_errors_are_the_tools_own_fault_unless_they_say_otherwise(retry, own_fault):
    error = ToolError("no dice", kind="any", retry=retry, own_fault=own_fault)
    assert call(box([error], retry_count=0)).own_fault == (retry or bool(own_fault))


REFUSED = Path(__file__).with_name("refused.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("tool", "params", "message"), [line.split(" | ") for line in REFUSED if line[0] != "#"])
def test_wrong_parameters_name_their_key_before_anything_starts(tmp_path, monkeypatch, tool, params, message):
    """The messages hold no secret."""
    for name in ("BRIGHTDATA_API_KEY", "BRIGHTDATA_ZONE"):
        monkeypatch.delenv(name, raising=False)
    corpus = write_jsonl(tmp_path / "c.jsonl", ANIMALS)
    path, _, made = tool.partition(" ")
    entry = {"class_path": f"verl.workers.rollout.tools.{path}"}
    entry["params"] = json.loads(params.replace("CORPUS", str(corpus)))
    config = {"tool_instances": {"t": entry}}
    if made:
        read_keys(ToolsConfig, config, "actor_rollout_ref.rollout.tools")
    with pytest.raises(ValueError) as error:
        if made:
            tool_class("t", entry)[0](**entry["params"])
        read_keys(ToolsConfig, config, "actor_rollout_ref.rollout.tools")
    told = f"{error.value!r} {error.value.__context__!r}" if made else str(error.value)
    assert re.search(".*".join(map(re.escape, message.split("…"))), str(error.value)) and "s3cr3t" not in told
