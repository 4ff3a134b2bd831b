"""The death of a vLLM server's engine core, of which the server's process tells the driver."""

import asyncio
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
import ray

from tests.forked import ray_of_forks
from verl.utils.fault_reports import reported_faults
from verl_patches.engine_deaths import report_engine_deaths
from vllm_patches import cpu_version_name


def test_upstreams_server_is_wrapped():
    cpu_version_name.install()  # upstream's module asks for vLLM's version
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    assert hasattr(vLLMHttpServer.run_server, "__wrapped__")


@pytest.mark.slow
def test_an_engine_that_died_is_reported_by_its_server():
    class Server:
        """A server whose engine core only sleeps."""

        async def run_server(self, args) -> None:
            self.engine = multiprocessing.Process(target=time.sleep, args=(600,), name="EngineCore")
            self.engine.start()

    @ray.remote(num_cpus=0)
    class ServerActor:
        def start(self) -> int:
            """Return the process id of the engine core."""
            report_engine_deaths(SimpleNamespace(vLLMHttpServer=Server))
            self.server = Server()
            asyncio.run(self.server.run_server(None))
            return self.server.engine.pid

    with ray_of_forks(num_cpus=1, object_store_memory=10**8):
        server = ServerActor.remote()
        pid = ray.get(server.start.remote())
        assert reported_faults() == []
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while not (faults := reported_faults()) and time.monotonic() < end:
            time.sleep(0.2)
        (fault,) = faults
        assert f"vLLM's EngineCore (process {pid} on " in fault
