"""A server's questions about its engine's adapters, counted by a fake engine."""

import asyncio
from types import SimpleNamespace

from verl_patches.known_adapters import remember_adapters
from vllm_patches import cpu_version_name


def test_upstreams_server_is_wrapped():
    cpu_version_name.install()  # upstream's module asks for vLLM's version
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    assert "remember_adapters" in vLLMHttpServer.collective_rpc.__code__.co_qualname


class Engine:
    """An engine in which a weight update removes the adapter, and adds it again a moment later."""

    def __init__(self):
        self.questions, self.adapters = 0, set()

    async def list_loras(self) -> set[int]:
        self.questions += 1
        await asyncio.sleep(0)
        return set(self.adapters)

    async def collective_rpc(self, method: str) -> None:
        self.adapters.clear()
        await asyncio.sleep(0.01)
        self.adapters.add(123)


def new_server_class() -> type:
    class Server:
        async def run_server(self, args) -> None:
            self.engine = Engine()

        async def collective_rpc(self, method: str) -> None:
            await self.engine.collective_rpc(method=method)

        async def generate(self) -> bool:
            return 123 in await self.engine.list_loras()

    return Server


def test_an_engine_is_asked_once_until_its_adapters_change():
    async def run():
        server_class = new_server_class()
        remember_adapters(SimpleNamespace(vLLMHttpServer=server_class))
        server = server_class()
        await server.run_server(None)

        async def requests() -> list[bool]:
            return await asyncio.gather(*(server.generate() for _ in range(100)))

        assert not any(await requests()) and server.engine.questions == 1
        update = asyncio.create_task(server.collective_rpc("update_weights_from_ipc"))
        await asyncio.sleep(0)  # the adapter is gone for a moment
        assert all(await requests()), "requests during an update get the new adapter"
        await update
        assert all(await requests()) and server.engine.questions == 2

    asyncio.run(run())
