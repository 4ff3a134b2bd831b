"""Environments of a user's class in processes: what a call returns, what ends it, and what is left behind."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.packages import unpacked
from tests.tables import table
from verl.workers.rollout.gym.process import Hosts, ProcessInstance
from verl.workers.rollout.stateful import InstanceLost, Step, result_in_time

GAMES = "tests.workers.rollout.gym"
GYMNASIUM = ("gymnasium==1.4.0", "farama-notifications==0.0.6")


@contextlib.asynccontextmanager
async def hosts_of(name: str):
    """No process is left after it."""
    hosts = Hosts(f"{GAMES}.{name}")
    try:
        async with asyncio.timeout(60):
            yield hosts
    finally:
        await hosts.stop()


async def begun(hosts: Hosts, goal=5) -> ProcessInstance:
    instance = hosts.instance({"goal": goal}, 7)
    await hosts.start()
    assert await instance.reset() == f"goal {goal}, seed 7"
    return instance


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while its file is read
        return False


def ends(pid: int) -> bool:
    """Whether a process ends soon."""
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.mark.parametrize("name", ["games.Sums", "games.CopiedSums", "games.AsyncSums", "gymnasium_games.GymnasiumSums"])
async def test_an_episode(name, monkeypatch):
    if name.startswith("gymnasium"):
        for package in GYMNASIUM:
            monkeypatch.syspath_prepend(str(unpacked(package)))

    async with hosts_of(name) as hosts:
        instance = await begun(hosts)
        steps = [await instance.step(action) for action in ("2", "3")]
        await instance.close()
        assert ends(instance.host.pid) and hosts.can_copy == (name == "games.CopiedSums")
    assert steps == [Step("sum 2", 0.0, False), Step("sum 5", 1.0, True)]


async def test_copies_are_independent_and_end_alone():
    async with hosts_of("games.CopiedSums") as hosts:
        one = await begun(hosts)
        await one.step("1")
        other = await one.copy()
        assert other.host is one.host
        assert [await one.step("1"), await other.step("3")] == [Step("sum 2", 0.0), Step("sum 4", 0.0)]
        await one.close()
        assert await other.step("1") == Step("sum 5", 1.0, True) and is_running(other.host.pid)
        await other.close()
        assert ends(other.host.pid)


async def test_a_step_that_fails_says_why_and_the_instance_goes_on():
    async with hosts_of("games.Sums") as hosts:
        instance = await begun(hosts)
        with pytest.raises(RuntimeError, match="ValueError: invalid literal for int.*'jump'"):
            await instance.step("jump")
        with pytest.raises(
            RuntimeError, match=r"TypeError: step returned 'no tuple', expected \(observation, reward, done\)"
        ):
            await instance.step("wrong")
        assert await instance.step("1") == Step("sum 1", 0.0)


@pytest.mark.parametrize("end", ["exit", "kill", "hang"])
async def test_a_process_that_ends_or_hangs_is_lost_and_its_copies_with_it(end):
    async with hosts_of("games.CopiedSums") as hosts:
        one = await begun(hosts)
        other = await one.copy()
        if end == "kill":
            os.kill(one.host.pid, signal.SIGKILL)
        error = TimeoutError if end == "hang" else InstanceLost
        with pytest.raises(error):
            await result_in_time(one.step("1" if end == "kill" else end), 0.2 if end == "hang" else 10)
        await asyncio.sleep(0.05)
        assert other.is_lost and ends(one.host.pid)
        with pytest.raises(InstanceLost):
            await other.step("1")
        await one.close()
        await other.close()
        assert await (await begun(hosts)).step("4") == Step("sum 4", 0.0), "a new one has a new process"


async def test_other_instances_answer_while_one_hangs():
    async with hosts_of("games.Sums") as hosts:
        one, other = await begun(hosts), await begun(hosts)
        hanging = asyncio.ensure_future(one.step("hang"))
        assert await result_in_time(other.step("1"), 5) == Step("sum 1", 0.0)
        hanging.cancel()


async def test_many_instances_at_once():
    async with hosts_of("games.Sums") as hosts:
        instances = [hosts.instance({"goal": 1}, 7) for _ in range(300)]
        await hosts.start()
        await asyncio.gather(*(instance.reset() for instance in instances))
        steps = await asyncio.gather(*(instance.step("1") for instance in instances))
    assert set(steps) == {Step("sum 1", 1.0, True)}


async def test_nothing_is_left_when_the_server_ends():
    async with hosts_of("games.Sums") as hosts:
        instance = await begun(hosts)
        hanging = asyncio.ensure_future(instance.step("hang"))
        await asyncio.sleep(0.1)
        await hosts.stop()
        with pytest.raises(InstanceLost):
            await hanging
    assert ends(instance.host.pid)


@pytest.mark.parametrize(("name", "message"), table(__file__, "classes that do not work"))
async def test_a_class_that_does_not_work_is_named(name, message):
    with pytest.raises(ValueError, match=f"environment.class_path={GAMES}.{name}: .*{message}"):
        async with hosts_of(name) as hosts:
            await begun(hosts)
