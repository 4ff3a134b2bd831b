"""Sessions of the Python tool: what lives on, what ends them, and trees of cells against straight runs."""

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest

from tests.tables import table
from tests.workers.rollout.tools.python.test_python_tool_on_cpu import SLOW, outcome
from verl.workers.rollout.stateful import InstanceKeys, InstancePool
from verl.workers.rollout.tools.environment import ToolSessions
from verl.workers.rollout.tools.python.session import NEW_SESSION
from verl.workers.rollout.tools.python.tool import PythonTool
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig

LIMITS = {"memory_mb": 256, "max_file_mb": 16, "cpu_seconds": 1, "num_workers": 2}


@contextlib.asynccontextmanager
async def session_tool(**params):
    tool = PythonTool(session=True, **{**LIMITS, **params})
    try:
        yield tool
    finally:
        await tool.close()


async def run_cells(cells, timeouts, **params):
    """Return what the cells of one session told: (text, kind of error or None)."""
    async with session_tool(**params) as tool, contextlib.aclosing(tool.new_session()) as session:
        return [await outcome(session, cell, timeout) for cell, timeout in zip(cells, timeouts, strict=True)]


def descendants():
    return set(psutil.Process().children(recursive=True))


def outputs(*cells, **params):
    texts = asyncio.run(run_cells(cells, [SLOW] * len(cells), **params))
    assert [kind for _, kind in texts] == [None] * len(cells), texts
    return [text for text, _ in texts]


def test_names_imports_functions_files_and_last_values_live_on():
    assert outputs(
        "import math\nx = 6",
        "def f(y):\n    return y * x",
        "f(7)",
        "_ + 1",
        "class A:\n    pass\nopen('a', 'w').write(f'{math.pi:.2f}')",
        "x = 2\nf(7), open('a').read(), A.__module__, A().__class__ is A",
        "import pickle\ntype(pickle.loads(pickle.dumps(A()))) is A",
        "    ```python\n    x + 1\n    ```",
    ) == ["", "", "42\n", "43\n", "4\n", "(14, '3.14', '__main__', True)\n", "True\n", "3\n"]


def test_an_exception_does_not_end_a_session():
    raised = ("MemoryError", "KeyboardInterrupt", "SystemExit(3)", "GeneratorExit", "ValueError('é')")
    cells = ["x = 5", *(f"raise {error}" for error in raised), "bytearray(1 << 40)", "y = (", "x"]
    texts = outputs(*cells)
    assert texts[-1] == "5\n" and "SyntaxError" in texts[-2] and "MemoryError" in texts[-3]
    for error, text in zip(raised, texts[1:], strict=False):
        assert (error.split("(")[0] in text) == (error != "SystemExit(3)")


def test_a_traceback_shows_the_lines_of_the_cell_that_defined_a_function():
    _, text = outputs("def f(x):\n    return 1 / x  # here", "f(0)")
    assert 'File "<python 1>", line 2, in f\n    return 1 / x  # here' in text and 'File "<python 2>", line 1' in text


def test_equal_sessions_draw_equal_numbers():
    cells = ("import random, numpy\n(random.random(), numpy.random.rand())", "({str(i) for i in range(9)}, hash('a'))")
    assert outputs(*cells) == outputs(*cells) and outputs(*cells, preload=["numpy"]) == outputs(*cells)


@pytest.mark.parametrize("cell, kind, message", table(__file__, "cells over their limits"))
def test_a_cell_over_its_limit_ends_the_session_and_the_next_call_says_so(cell, kind, message):
    cells = ["x = 1; open('a', 'w').write('a')", cell, "import os\nos.listdir(), 'x' in dir()", "1"]
    timeouts = [SLOW, 2 if kind == "timeout" else 3 * SLOW, SLOW, SLOW]
    first, (text, told_kind), again, after = asyncio.run(run_cells(cells, timeouts))
    assert first == ("1\n", None) and told_kind == kind and message in text and "The session has ended." in text
    assert again == (f"{NEW_SESSION}([], False)\n", None) and after == ("1\n", None)


def test_cpu_time_is_limited_by_cell():
    burn = "import time\nuntil = time.process_time() + 0.6\nwhile time.process_time() < until: pass"
    assert outputs(*[burn] * 4) == [""] * 4


async def test_an_idle_session_holds_no_place():
    async with session_tool(num_workers=1) as tool:
        sessions = [tool.new_session() for _ in range(4)]
        for turn in range(2):
            texts = await asyncio.gather(*(outcome(session, f"x = {i}\nx") for i, session in enumerate(sessions)))
            assert texts == [(f"{i}\n", None) for i in range(4)], turn
        hog = asyncio.ensure_future(outcome(sessions[0], "import time; time.sleep(60)", 2))
        await asyncio.sleep(0.3)
        _, busy = await outcome(sessions[1], "x", 2)
        await hog
        assert (busy, await outcome(sessions[1], "x")) == ("busy", ("1\n", None))


async def test_more_sessions_than_a_cell_may_have_files():
    async with session_tool(preload=[]) as tool:
        sessions = [tool.new_session() for _ in range(80)]
        for i, session in enumerate(sessions):
            assert await outcome(session, f"x = {i}") == ("", None)
        assert [await outcome(session, "x") for session in sessions] == [(f"{i}\n", None) for i in range(80)]
        await asyncio.gather(*(session.close() for session in sessions))


def box() -> ToolBox:
    entry = {"class_path": "verl.workers.rollout.tools.python.tool.PythonTool", "params": LIMITS | {"session": True}}
    return ToolBox(ToolsConfig(tool_instances={"python": entry}, timeout=SLOW))


@pytest.mark.parametrize("whom, when", [("session", "idle"), ("server", "idle"), ("server", "in a call")])
async def test_a_session_whose_process_is_killed_is_brought_back(whom, when):
    tools = box()
    sessions = ToolSessions(tools, InstancePool(InstanceKeys()))
    call, states = await sessions.call(None, "python", "import os\nx = 41\nos.getpid()")
    process = psutil.Process(int(call.text))
    victim = process if whom == "session" else process.parent()
    if when == "idle":
        victim.kill()
        psutil.wait_procs([process], SLOW)
    task = asyncio.ensure_future(sessions.call(states, "python", "import time\ntime.sleep(0.5)\nx + 1"))
    if when == "in a call":
        await asyncio.sleep(0.2)
        victim.kill()
    call, _ = await task
    await sessions.close()
    await tools.close()
    assert (call.text, call.ok, sessions.metrics()["environment/replays"]) == ("42\n", True, 1)


async def test_cancelled_calls_and_closed_sessions_leave_no_process_and_no_folder():
    others, tool = descendants(), PythonTool(session=True, **LIMITS)
    running, idle = tool.new_session(), tool.new_session()
    look = "import os\nprint(os.getpid(), os.getcwd())"
    left = [(await outcome(session, look))[0].split() for session in (running, idle)]
    call = asyncio.ensure_future(running.execute("import time; time.sleep(60)", timeout=60))
    await asyncio.sleep(0.3)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert running.is_lost
    await running.close()
    await idle.close()
    gone = [not psutil.pid_exists(int(pid)) and not Path(folder).exists() for pid, folder in left]
    third = tool.new_session()
    await outcome(third, "1")
    everybody = list(descendants() - others)
    await tool.close()  # with an open session
    await third.close()
    assert call.cancelled() and all(gone) and not psutil.wait_procs(everybody, SLOW)[1]
    assert not Path(left[0][1]).parent.exists()


async def test_the_trial_of_a_tool_with_sessions_runs():
    async with session_tool() as tool:
        await tool.start(timeout=60)
        assert await tool.execute("'alone'", timeout=SLOW) == "'alone'\n" and not tool.must_repeat
