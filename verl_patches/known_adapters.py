"""Lets a vLLM server ask its engine only once, until adapters change, whether it has a LoRA adapter.

verl 0.9.1 awaits `engine.list_loras()` before every request of a run with an adapter. The engine answers when it has
finished its steps in flight, and a tree asks before each of its branches. Adapters change only in the server's
`collective_rpc`, for whose end a question waits. This can go when upstream's server remembers the answer.
"""

import asyncio
import functools
from types import ModuleType


def remember_adapters(vllm_async_server: ModuleType) -> None:
    """Let `vLLMHttpServer` remember the answer of `engine.list_loras()` until its next `collective_rpc`."""
    server = vllm_async_server.vLLMHttpServer
    run_server, collective_rpc = server.run_server, server.collective_rpc

    @functools.wraps(run_server)
    async def run_and_remember(self, args):
        await run_server(self, args)
        ask, self.adapters_lock, self.adapters = self.engine.list_loras, asyncio.Lock(), None

        async def list_loras() -> set[int]:
            async with self.adapters_lock:
                if self.adapters is None:
                    self.adapters = await ask()
                return self.adapters

        self.engine.list_loras = list_loras

    @functools.wraps(collective_rpc)
    async def call_and_forget(self, *args, **kwargs):
        async with self.adapters_lock:
            self.adapters = None
            return await collective_rpc(self, *args, **kwargs)

    server.run_server, server.collective_rpc = run_and_remember, call_and_forget
