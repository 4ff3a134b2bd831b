"""Lets a vLLM server report the death of its engine core to the driver, which ends the run.

verl 0.9.1 notices the death at the server's next request, and never while it sends weights to the engine. This can go
when upstream's server watches its engine core.
"""

import functools
import multiprocessing
import threading
from multiprocessing.connection import wait as wait_for_sentinels
from types import ModuleType

import ray

from verl.utils.fault_reports import report_fault


def report_engine_deaths(vllm_async_server: ModuleType) -> None:
    """Let `vLLMHttpServer` watch its engine cores once it has started them."""
    server = vllm_async_server.vLLMHttpServer
    run_server = server.run_server

    @functools.wraps(run_server)
    async def run_and_watch(self, args):
        await run_server(self, args)
        report_first_death("EngineCore")

    server.run_server = run_and_watch


def report_first_death(name: str) -> None:
    """Start a thread that waits for the death of a child process, named `name`…, and reports it to the driver."""
    node = ray.util.get_node_ip_address()
    children = [child for child in multiprocessing.active_children() if child.name.startswith(name)]
    names = {child.sentinel: f"vLLM's {child.name} (process {child.pid} on {node})" for child in children}

    def wait() -> None:
        for sentinel in wait_for_sentinels(list(names)):
            report_fault(f"{names[sentinel]} died, often because memory ran out")

    threading.Thread(target=wait, daemon=True).start()
