"""Requests that share calls: each gets its own answer or error, whatever the order in which they end."""

import asyncio
import gc
from types import SimpleNamespace

import pytest

from verl.workers.rollout.engines.request_batching import BatchingServer, RequestBatcher


class Server(BatchingServer):
    """Answers with the prompt after as many seconds as it says; counts requests and calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.asked, self.running, self.dead = [], 0, 0, asyncio.Event()
        self.fetching = 0.0  # seconds that Ray takes to fetch a submit's arguments

    async def generate(self, prompt: str, seconds: float = 0.0):
        self.asked += 1
        self.running += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.running -= 1
        if prompt == "bad":
            raise ValueError("no such prompt")
        return prompt

    def handle(self):
        """Return a handle like Ray's: a call begins at once, and ends with an error when the actor dies."""

        def remote(method):
            async def ended_by_death(call):
                death = asyncio.ensure_future(self.dead.wait())
                done, _ = await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
                if call not in done:
                    raise ConnectionError("the actor died")
                death.cancel()
                return call.result()

            async def started(*args):
                if self.fetching and method.__name__ == "submit":
                    await asyncio.sleep(self.fetching)
                return await method(*args)

            def call(*args):
                if self.dead.is_set():
                    raise ConnectionError("the actor is dead")
                self.calls.append(method.__name__)
                return asyncio.create_task(ended_by_death(asyncio.create_task(started(*args))))

            return SimpleNamespace(remote=call)

        return SimpleNamespace(**{name: remote(getattr(self, name)) for name in ("submit", "collect", "give_up")})


async def test_each_request_gets_its_answer_or_its_error_and_few_calls_are_made():
    server = Server()
    batcher = RequestBatcher(server.handle())
    prompts = [*map(str, range(50)), "bad"]
    *answers, error = await asyncio.gather(*(batcher.send(prompt=p) for p in prompts), return_exceptions=True)
    assert answers == prompts[:-1] and isinstance(error, RuntimeError) and "ValueError: no such prompt" in str(error)
    assert server.asked == 51 and server.calls == ["submit", "collect"]
    assert batcher.collecting is None and not batcher.waiting


async def test_a_quick_request_does_not_wait_for_a_slow_one_and_may_be_followed_by_others():
    server, ended = Server(), []
    batcher = RequestBatcher(server.handle())

    async def turns(name: str, seconds: float, n: int):
        for turn in range(n):
            ended.append(await batcher.send(prompt=f"{name}{turn}", seconds=seconds))

    await asyncio.gather(turns("slow", 0.3, 1), turns("quick", 0.01, 3))
    assert ended == ["quick0", "quick1", "quick2", "slow0"]
    # another time after everything has ended
    assert await batcher.send(prompt="later") == "later"


async def test_clients_of_one_server_are_kept_apart():
    server = Server()
    batchers = [RequestBatcher(server.handle()) for _ in range(3)]
    asked = [batcher.send(prompt=f"{i}", seconds=0.01 * (3 - i)) for i, batcher in enumerate(batchers)]
    assert await asyncio.gather(*asked) == ["0", "1", "2"]


@pytest.mark.parametrize("fetching", [0.0, 0.01])
async def test_a_cancelled_request_ends_on_the_server(fetching):
    server = Server()
    server.fetching = fetching
    batcher = RequestBatcher(server.handle())
    asked = [asyncio.create_task(batcher.send(prompt=f"{i}", seconds=60)) for i in range(5)]
    kept = asyncio.create_task(batcher.send(prompt="kept", seconds=0.2))
    await asyncio.sleep(0.02)
    assert server.running == 6
    at_once = asyncio.create_task(batcher.send(prompt="never submitted before", seconds=60))
    await asyncio.sleep(0)
    for task in (*asked, at_once):
        task.cancel()
    await asyncio.sleep(0.05)
    assert server.running == 1 and server.calls.count("give_up") == 1
    assert await kept == "kept"
    await asyncio.wait_for(batcher.collecting or asyncio.sleep(0), 1)
    assert not batcher.waiting and not server._batch_tasks


async def test_a_servers_death_ends_every_request_that_waits_and_every_later_one():
    server = Server()
    batcher = RequestBatcher(server.handle())
    waiting = [asyncio.create_task(batcher.send(prompt="x", seconds=60)) for _ in range(3)]
    await asyncio.sleep(0.02)
    server.dead.set()
    errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [str(error) for error in errors] == ["the actor died"] * 3
    with pytest.raises(ConnectionError, match="the actor is dead"):
        await asyncio.wait_for(batcher.send(prompt="x"), 5)
    await asyncio.sleep(0)
    gc.collect()
