"""Sends many requests to a rollout server in few calls through Ray, because a call costs about 1 ms of CPU.

    agent-loop worker                             server
    RequestBatcher.send ─┐
    RequestBatcher.send ─┴─ submit(client, [...]) ──> a task for each request
                            collect(client) ────────> waits for the first answer and those that follow at once
                          <─ [(number, answer), ...]

Requests from one tick of the worker's event loop are submitted together. Answers that one step of the engine finishes
are collected together, for all groups of the worker. If a request is cancelled on the worker, for example because its
group takes too long, the server cancels it too. If a server dies, `collect` and every waiting request fail.
"""

import asyncio
import contextlib
import itertools
import traceback
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any
from uuid import uuid4

from verl.utils.fault_reports import cause_of

COLLECT_SECONDS = 0.002  # within about this time end the requests that end in one step of the engine


class BatchingServer:
    """Base class that adds the server's side to an asynchronous actor with the method `generate`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._batch_answers: defaultdict[str, asyncio.Queue] = defaultdict(asyncio.Queue)  # client -> new answers
        self._batch_tasks: dict[tuple[str, int], asyncio.Task] = {}  # client, number of a request -> its task

    async def submit(self, client: str, requests: list[tuple[int, dict[str, Any]]]) -> None:
        """Start requests; each is a pair (number chosen by the client, arguments of `generate`)."""
        for number, request in requests:
            task = asyncio.create_task(self._answer(client, number, request))
            self._batch_tasks[client, number] = task
            task.add_done_callback(lambda _, key=(client, number): self._batch_tasks.pop(key))

    async def give_up(self, client: str, numbers: list[int]) -> None:
        """Cancel these requests of a client; vLLM aborts those that have not ended."""
        for number in numbers:
            if task := self._batch_tasks.get((client, number)):
                task.cancel()

    async def collect(self, client: str) -> list[tuple[int, Any, str | None]]:
        """Wait for and return the client's new answers, each (number, result of `generate`, error message or None)."""
        answers = self._batch_answers[client]
        first = await answers.get()
        await asyncio.sleep(COLLECT_SECONDS)
        return [first, *(answers.get_nowait() for _ in range(answers.qsize()))]

    async def _answer(self, client: str, number: int, request: dict[str, Any]) -> None:
        try:
            answer = number, await self.generate(**request), None
        except (Exception, asyncio.CancelledError) as error:
            answer = number, None, f"{cause_of(error)}\n{''.join(traceback.format_exception(error))}"
        self._batch_answers[client].put_nowait(answer)


class RequestBatcher:
    """The worker's side of one server, the Ray handle of a `BatchingServer`."""

    def __init__(self, server):
        self.server, self.client = server, uuid4().hex
        self.numbers = itertools.count()
        self.new: list[tuple[int, dict[str, Any]]] = []
        self.given_up: list[int] = []
        self.waiting: dict[int, asyncio.Future] = {}
        self.calls: set[asyncio.Task] = set()
        self.submits: set[asyncio.Task] = set()  # submissions on their way, also in `calls`
        self.collecting: asyncio.Task | None = None

    async def send(self, **request: Any) -> Any:
        """Return the result of the server's `generate`; raise RuntimeError with the message of its error."""
        loop, number = asyncio.get_running_loop(), next(self.numbers)
        if not self.new:
            self.submits.add(submit := self._begin(self._submit()))
            submit.add_done_callback(self.submits.discard)
        self.new.append((number, request))
        self.waiting[number] = answer = loop.create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            if not self.given_up:
                self._begin(self._give_up())
            self.given_up.append(number)
            raise
        finally:
            self.waiting.pop(number, None)

    def _begin(self, call: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Make a call in the next tick of the event loop, and return its task."""
        self.calls.add(task := asyncio.create_task(call))
        task.add_done_callback(self.calls.discard)
        return task

    async def _submit(self) -> None:
        requests, self.new = self.new, []
        if self.collecting is None:
            self.collecting = asyncio.create_task(self._collect())
        try:
            await self.server.submit.remote(self.client, requests)
        except Exception as error:
            self._fail(error, [number for number, _ in requests])

    async def _give_up(self) -> None:
        numbers, self.given_up = self.given_up, []
        if self.submits:  # Ray may start a call with large arguments after later ones
            await asyncio.wait(self.submits)
        with contextlib.suppress(Exception):  # if the server has died, so have its requests
            await self.server.give_up.remote(self.client, numbers)

    async def _collect(self) -> None:
        try:
            while self.waiting:
                for number, answer, error in await self.server.collect.remote(self.client):
                    future = self.waiting.pop(number, None)
                    if future is None or future.done():
                        continue  # the request was cancelled in the meantime
                    if error is None:
                        future.set_result(answer)
                    else:
                        future.set_exception(RuntimeError(error))
        except Exception as error:
            self._fail(error, list(self.waiting))
        finally:
            self.collecting = None

    def _fail(self, error: Exception, numbers: list[int]) -> None:
        for number in numbers:
            future = self.waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_exception(error)
