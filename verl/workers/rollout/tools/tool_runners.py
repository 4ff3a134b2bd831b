"""Runs a tool's coroutines in a thread of their own, so that callers get an answer in time from a tool that blocks its
event loop or ignores a cancellation."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from verl.utils.user_code import guard_tasks, guarded

T = TypeVar("T")
# longest wait, in seconds, for a cancelled call to end
CANCEL_SECONDS = 2.0


class ToolThread:
    """A thread with the event loop of one tool, which starts with the first call. If a cancelled call blocks it, later
    calls run in a new thread."""

    def __init__(self, name: str):
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        """Call a function in the tool's thread, and return its coroutine's result; cancelling the caller cancels it.

        Raise asyncio.TimeoutError if the coroutine does not end in `seconds`; it is then cancelled, and may ignore
        that. Raise UserCodeExit for an exception that is no `Exception`.
        """
        tasks: list[asyncio.Task | None] = []
        given_up = threading.Event()

        async def in_thread() -> T:
            tasks.append(asyncio.current_task())
            if given_up.is_set():
                raise asyncio.CancelledError
            return await guarded(call(), self.name)

        loop = self._started_loop()
        ended = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(in_thread(), loop))

        async def give_up() -> None:
            given_up.set()
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks if task is not None])
            await asyncio.wait({ended}, timeout=CANCEL_SECONDS)
            if not ended.done():
                if loop is self._loop and not await self._responds(loop):
                    self._loop = None
            elif not ended.cancelled():
                ended.exception()  # retrieved, because asyncio logs an exception that is never retrieved

        try:
            done, _ = await asyncio.wait({ended}, timeout=seconds)
        except asyncio.CancelledError:
            await give_up()
            raise
        if not done:
            await give_up()
            raise asyncio.TimeoutError
        if ended.cancelled():
            raise RuntimeError(f"{self.name} cancelled its own call")
        return ended.result()

    async def _responds(self, loop: asyncio.AbstractEventLoop) -> bool:
        probe = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        return bool((await asyncio.wait({probe}, timeout=CANCEL_SECONDS))[0])

    def stop(self) -> None:
        """End the thread after its current step."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            self._loop = asyncio.new_event_loop()
            guard_tasks(self._loop)
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"tool {self.name}", daemon=True)
            self._thread.start()
        return self._loop
