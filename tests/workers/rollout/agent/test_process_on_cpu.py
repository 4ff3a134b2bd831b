"""Agents' programs: what they get, how they end, and what is left behind."""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tables import table
from tests.workers.rollout.agent import programs
from tests.workers.rollout.gym.test_process_on_cpu import ends, is_running
from verl.workers.rollout.agent.process import Outcome, Programs

KINDS = ("command", "class_path")
both_kinds = pytest.mark.parametrize("kind", KINDS)
URL, KEY = "http://127.0.0.1:9/v1", "key of a trajectory"


def of_kind(kind: str, name: str, **keys) -> Programs:
    if kind == "command":
        return Programs(command=[sys.executable, programs.__file__, name], **keys)
    return Programs(class_path=f"{programs.__name__}.{name}", **keys)


def played(started: Programs, play):
    """Return the result of `play(started)`, after which the programs' folder is gone."""

    async def run():
        try:
            await started.prepare()
            return await asyncio.wait_for(play(started), 30)
        finally:
            await started.stop()

    result = asyncio.run(run())
    assert not Path(started.folder).exists()
    return result


def outcome(kind: str, name: str, row: Any = None, **keys) -> Outcome:
    return played(of_kind(kind, name, **keys), lambda started: started.start(row, URL, KEY).outcome())


async def children_of(file: Path) -> list:
    """Return what `starts_children` has written: ids of processes and the temporary folder."""
    while not file.exists() or not file.read_text():
        await asyncio.sleep(0.01)
    return json.loads(file.read_text())


@pytest.mark.parametrize(("kind", "name"), [("command", "tell"), ("class_path", "tell"), ("class_path", "tell_async")])
def test_program_gets_its_row_and_a_clean_environment(kind, name, monkeypatch):
    monkeypatch.setenv("SECRET", "of the trainer")
    row: dict[str, Any] = {"question": "ü\u2028\ud800", "answers": [1, None, {}]}
    ended = outcome(kind, name, row, env={"SEARCH_URL": "http://search"})
    assert ended.failed == ""
    task, base_url, api_key, environment, at_start, folder = json.loads(ended.result)
    assert (task, base_url, api_key, folder) == (row, URL, KEY, os.getcwd())
    assert environment["HOME"] == environment["TMPDIR"] and not Path(environment["TMPDIR"]).exists()
    assert (environment["SEARCH_URL"], environment["OPENAI_BASE_URL"]) == ("http://search", URL)
    names = {"PATH", "LANG", "HOME", "TMPDIR", "PYTHONHASHSEED", "SEARCH_URL"}
    assert set(environment) - {"LC_CTYPE"} == names | {"OPENAI_BASE_URL", "OPENAI_API_KEY"}
    assert names <= set(at_start) <= set(environment)  # /proc/self/environ


def test_long_row_arrives():
    code = "import json, sys; print(len(json.load(sys.stdin))); assert sys.stdin.read() == ''"
    started = Programs(command=["python3", "-c", code])
    assert played(started, lambda started: started.start("x" * 5_000_000, URL, KEY).outcome()) == Outcome("5000000")


@pytest.mark.parametrize(("name", "failed_command", "failed_function"), table(__file__, "failed programs"))
def test_program_without_result_says_why_it_failed(name, failed_command, failed_function):
    assert outcome("command", name) == Outcome("", failed_command)
    assert outcome("class_path", name) == Outcome("", failed_function)


@both_kinds
def test_long_outputs_are_cut_to_their_end(kind):
    line_ends = 2 if kind == "command" else 0
    assert outcome(kind, "prints_much") == Outcome("x" * ((64 << 10) - line_ends))


@both_kinds
def test_memory_is_limited(kind):
    assert outcome(kind, "takes_memory", {"mb": 300}, memory_mb=1024) == Outcome(str(300 << 20))
    assert outcome(kind, "takes_memory", {"mb": 1100}, memory_mb=1024) == Outcome("", "out of memory")


@both_kinds
def test_nothing_that_a_program_started_outlives_it(kind):
    ended = outcome(kind, "starts_children", {})
    assert ended.failed == "" and not any(is_running(pid) for pid in json.loads(ended.result))


@both_kinds
def test_hanging_program_is_ended(kind, tmp_path):
    async def play(started):
        program = started.start({"hang": True, "file": f"{tmp_path}/pids"}, URL, KEY)
        waiting = asyncio.ensure_future(program.outcome())
        *pids, _, folder = await children_of(tmp_path / "pids")
        waiting.cancel()
        await asyncio.gather(program.end(), program.end())
        assert not any(is_running(pid) for pid in pids) and not Path(folder).exists()
        await program.end()
        assert [await program.outcome(), await program.outcome()] == [Outcome("", "ended from outside")] * 2
        at_once = started.start({"hang": True}, URL, KEY)
        await at_once.end()
        return await at_once.outcome()

    assert played(of_kind(kind, "starts_children"), play) == Outcome("", "ended from outside")


@both_kinds
def test_killed_keeper_leaves_nothing(kind, tmp_path):
    async def play(started):
        program = started.start({"hang": True, "file": f"{tmp_path}/pids"}, URL, KEY)
        *pids, keeper, folder = await children_of(tmp_path / "pids")
        os.kill(keeper, signal.SIGKILL)
        ended = await program.outcome()
        assert all(ends(pid) for pid in (pids[0], pids[1], pids[3])) and not Path(folder).exists()
        return ended, pids[2]

    ended, without_mark = played(of_kind(kind, "starts_children"), play)
    assert ended == Outcome("", "the process that watches it was killed") and ends(without_mark)


@pytest.mark.parametrize("without_server", [False, True])
@both_kinds
def test_nothing_outlives_a_killed_rollout_worker(kind, without_server, tmp_path):
    file = tmp_path / "pids"
    row = {"hang": True, "file": str(file)}
    worker = multiprocessing.get_context("fork").Process(target=outcome, args=(kind, "starts_children", row))
    worker.start()
    *pids, folder = asyncio.run(asyncio.wait_for(children_of(file), 30))
    if without_server:
        psutil.Process(pids[-1]).parent().kill()
        time.sleep(0.1)
        assert all(map(is_running, pids))
    worker.kill()
    worker.join()
    assert all(ends(pid) for pid in pids)
    last = Path(folder) if without_server else Path(folder).parent  # the server removes the parent
    deadline = time.monotonic() + 5
    while last.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not last.exists()
    shutil.rmtree(Path(folder).parent, ignore_errors=True)


@both_kinds
def test_many_at_once_leave_the_server_alone(kind):
    async def play(started):
        before = set(psutil.Process().children(recursive=True))  # the server, and what other tests have started
        running = [started.start({"number": number}, URL, KEY) for number in range(32)]
        ended = await asyncio.gather(*(program.outcome() for program in running))
        await asyncio.sleep(0.2)
        assert set(psutil.Process().children(recursive=True)) <= before  # zombies count
        return [json.loads(one.result)[0]["number"] for one in ended]

    assert played(of_kind(kind, "tell"), play) == list(range(32))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"command": ["no-such-program", "x"]}, r"environment.command=\['no-such-program', 'x'\]: there is no such"),
        ({"class_path": f"{programs.__name__}.missing"}, "environment.class_path=.*missing: .*no attribute 'missing'"),
        ({"class_path": "no_such_module.run"}, "environment.class_path=no_such_module.run: ModuleNotFoundError"),
        ({"class_path": f"{programs.__name__}.SLEEP"}, "environment.class_path=.*SLEEP: it is not a function"),
    ],
)
def test_program_that_does_not_exist_is_named_by_its_key(keys, message):
    with pytest.raises(ValueError, match=message):
        played(Programs(**keys), None)
