"""Time outside of pauses, and work that may take so much of it."""

import asyncio

import pytest

from verl.workers.rollout.pause_clock import PauseClock


def test_pauses_do_not_count():
    times = iter([0.0, 2.0, 5.0, 5.0, 6.0, 9.0, 10.0])
    clock = PauseClock(lambda: next(times))
    assert clock.seconds() == 0.0
    clock.pause()  # at 2
    clock.pause()
    assert clock.seconds() == 2.0
    clock.resume()  # at 5
    clock.resume()
    assert clock.seconds() == 5.0 - 3.0 and clock.seconds() == 6.0 - 3.0
    clock.pause()  # at 9
    clock.resume()  # at 10
    assert clock._paused_seconds == 4.0


async def sleeping(seconds: float, ended: list) -> str:
    try:
        await asyncio.sleep(seconds)
        return "done"
    finally:
        ended.append(seconds)


@pytest.mark.parametrize("limit", [None, 5.0])
def test_work_within_its_time(limit):
    assert asyncio.run(PauseClock().wait_for(sleeping(0.01, []), limit)) == "done"


def test_work_beyond_its_time_is_cancelled():
    ended = []
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(PauseClock().wait_for(sleeping(60, ended), 0.05))
    assert ended == [60]


def test_an_error_is_the_works_own():
    async def fails():
        raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        asyncio.run(PauseClock().wait_for(fails(), 5.0))


def test_a_pause_stretches_the_time_and_its_end_starts_it_again():
    async def paused(work_seconds: float) -> str:
        clock = PauseClock()
        clock.pause()
        asyncio.get_running_loop().call_later(0.3, clock.resume)
        return await clock.wait_for(sleeping(work_seconds, []), 0.1)

    assert asyncio.run(paused(0.2)) == "done"  # within the pause, in which no time passes
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(paused(60))


def test_a_pause_that_begins_in_the_meantime():
    async def run() -> str:
        clock, loop = PauseClock(), asyncio.get_running_loop()
        loop.call_later(0.02, clock.pause)
        loop.call_later(0.4, clock.resume)
        return await clock.wait_for(sleeping(0.3, []), 0.1)

    assert asyncio.run(run()) == "done"


def test_cancelled_from_outside_the_work_has_ended():
    async def run() -> list:
        ended = []
        task = asyncio.ensure_future(PauseClock().wait_for(sleeping(60, ended), None))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return ended

    assert asyncio.run(run()) == [60]
