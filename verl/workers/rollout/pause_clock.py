"""Seconds of a rollout's own: those in which the servers pause for an update of the policy do not count."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class PauseClock:
    """Stands still from `pause` to `resume`; each may be called again without effect.

    >>> clock = PauseClock()
    >>> clock.pause(); ...; clock.resume()
    >>> await clock.wait_for(grow(), 60)

    Args:
        now: of the seconds that pass.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now, self._paused_seconds, self._since = now, 0.0, 0.0
        self._running = asyncio.Event()
        self._running.set()

    def pause(self) -> None:
        if self._running.is_set():
            self._running.clear()
            self._since = self._now()

    def resume(self) -> None:
        if not self._running.is_set():
            self._paused_seconds += self._now() - self._since
            self._running.set()

    def seconds(self) -> float:
        """That have passed outside of pauses."""
        return (self._now() if self._running.is_set() else self._since) - self._paused_seconds

    async def wait_for(self, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
        """The result of `work`, which may take so many seconds of this clock; None: as many as it likes.

        Raises:
            asyncio.TimeoutError: it takes longer; it has been cancelled and has ended.
        """
        task = asyncio.ensure_future(work)
        end = None if seconds is None else self.seconds() + seconds
        try:
            while not task.done():
                resumed = asyncio.ensure_future(self._running.wait())
                await asyncio.wait({task, resumed}, return_when=asyncio.FIRST_COMPLETED)
                resumed.cancel()
                left = None if end is None else end - self.seconds()
                if left is not None and left <= 0 and not task.done():
                    raise asyncio.TimeoutError
                await asyncio.wait({task}, timeout=left)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
