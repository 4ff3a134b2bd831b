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


class VirtualTime(asyncio.SelectorEventLoop):
    """Its time is that of what is next; nothing waits."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


def run(work):
    """The result of `work(loop, clock)`."""
    loop = VirtualTime()
    try:
        return loop.run_until_complete(work(loop, PauseClock(loop.time)))
    finally:
        loop.close()


async def sleeping(seconds: float, ended: list) -> str:
    try:
        await asyncio.sleep(seconds)
        return "done"
    finally:
        ended.append(seconds)


@pytest.mark.parametrize("limit", [None, 5.0])
def test_work_within_its_time(limit):
    assert run(lambda loop, clock: clock.wait_for(sleeping(4, []), limit)) == "done"


def test_work_beyond_its_time_is_cancelled():
    ended = []
    with pytest.raises(asyncio.TimeoutError):
        run(lambda loop, clock: clock.wait_for(sleeping(60, ended), 5.0))
    assert ended == [60]


def test_an_error_is_the_works_own():
    async def fails():
        raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        run(lambda loop, clock: clock.wait_for(fails(), 5.0))


def check(paused, in_time):
    if in_time:
        assert run(paused) == "done"
    else:
        with pytest.raises(asyncio.TimeoutError):
            run(paused)


@pytest.mark.parametrize(("work", "in_time"), [(20.0, True), (39.0, True), (41.0, False)])
def test_a_pause_at_the_start_stretches_the_time(work, in_time):
    """Paused from 0 to 30, ten seconds allowed: it may take forty."""

    async def paused(loop, clock):
        clock.pause()
        loop.call_later(30, clock.resume)
        return await clock.wait_for(sleeping(work, []), 10)

    check(paused, in_time)


@pytest.mark.parametrize(("work", "in_time"), [(30.0, True), (47.0, True), (49.0, False)])
def test_a_pause_that_begins_in_the_meantime(work, in_time):
    """Paused from 2 to 40 and not from 40 on; ten seconds allowed: two before, eight after."""

    async def paused(loop, clock):
        loop.call_later(2, clock.pause)
        loop.call_later(40, clock.resume)
        return await clock.wait_for(sleeping(work, []), 10)

    check(paused, in_time)


def test_cancelled_from_outside_the_work_has_ended():
    async def cancelled(loop, clock):
        ended = []
        task = asyncio.ensure_future(clock.wait_for(sleeping(60, ended), None))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return ended

    assert run(cancelled) == [60]
