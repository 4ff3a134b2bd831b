"""Tools that never await run in real processes, which are killed at the time limit."""

import asyncio
import os
import time

import psutil
import pytest

from tests.workers.rollout.tools.blocking_tools import SCHEMA
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig

pytestmark = pytest.mark.slow

TOOLS = f"{__package__}.blocking_tools" if __package__ else "tests.workers.rollout.tools.blocking_tools"


def box(name: str, **config) -> ToolBox:
    entry = {"class_path": f"{TOOLS}.{name}", "params": {"tool_schema": SCHEMA} if name == "Upstream" else {}}
    return ToolBox(ToolsConfig(tool_instances={"any": entry}, **{"timeout": 2, "retry_count": 0} | config))


@pytest.mark.parametrize("name", ["Blocking", "Plain", "Upstream"])
def test_a_call_that_holds_the_lock_ends_in_time_and_blocks_nothing_else(name):
    async def run():
        made, ticks = box(name), []

        async def tick():
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.05)

        await made.start()
        first = await made.call("block", "works")
        ticking, started = asyncio.ensure_future(tick()), time.monotonic()
        held = await made.call("block", "backtracks")
        seconds = time.monotonic() - started
        ticking.cancel()
        outcomes = [await made.call("block", query) for query in ("works", "bad", "exits", "dies", "works")]
        children = {*psutil.Process().children(recursive=True)} - others
        await made.close()
        pause = max(later - sooner for sooner, later in zip(ticks, ticks[1:], strict=False))
        return first, held, seconds, pause, outcomes, children

    others = {*psutil.Process().children(recursive=True)}  # of tests before this one
    first, held, seconds, pause, (again, bad, exits, dies, last), children = asyncio.run(run())
    assert first.ok and again.ok and last.ok and first.text != again.text != last.text
    assert first.text.split(" in ")[0] == "works" and int(first.text.split(" in ")[1]) != os.getpid()
    assert (held.ok, held.error, held.own_fault) == (False, "timeout", True) and seconds < 5 and pause < 1.5
    assert not bad.ok and "no such page" in bad.text
    assert (exits.error, exits.own_fault, dies.error, dies.own_fault) == ("SystemExit", True, "crash", True)
    tools = [child for child in children if child.is_running() and "resource_tracker" not in " ".join(child.cmdline())]
    assert tools == []


def test_a_call_that_waits_for_another_is_not_killed_with_it():
    async def run():
        made = box("Blocking", retry_count=1)
        await made.start()
        outcomes = await asyncio.gather(made.call("block", "sleeps"), made.call("block", "works"))
        await made.close()
        return outcomes

    slow, waiting = asyncio.run(run())
    assert slow.error == "timeout" and waiting.ok
