"""Weights through sockets between the ends of a delivery, by upstream's protocol."""

import asyncio

import pytest
import ray
import torch

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.cpu_checkpoint_engine import CPUCheckpointEngine

WEIGHTS = {
    "embed": torch.randn(50, 8, generator=torch.Generator().manual_seed(0)),
    "transposed": torch.arange(12.0).view(3, 4).T,
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "count": torch.tensor([1, 2, 3]),
}


async def delivery(senders: list[CPUCheckpointEngine], receivers: list[CPUCheckpointEngine], weights) -> list[dict]:
    """Send the weights and return what each receiver gets."""
    metadata = [engine.prepare() for engine in [*senders, *receivers]]
    of_senders, of_receivers = CPUCheckpointEngine.build_topology(len(senders), len(receivers), metadata)
    for engines, kwargs in ((senders, of_senders), (receivers, of_receivers)):
        assert all(len(values) == len(engines) for values in kwargs.values())
        for i, engine in enumerate(engines):
            engine.init_process_group(**{name: values[i] for name, values in kwargs.items()})

    async def receive(engine: CPUCheckpointEngine) -> dict:
        return {name: tensor async for name, tensor in engine.receive_weights(global_steps=1)}

    sending = [engine.send_weights(iter(weights.items()), global_steps=1) for engine in senders]
    *_, received = await asyncio.gather(*sending, asyncio.gather(*map(receive, receivers)))
    for engine in [*senders, *receivers]:
        engine.finalize()
    return received


@pytest.fixture(autouse=True)
def this_machine(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


def engines(n: int, **options) -> list[CPUCheckpointEngine]:
    return [CheckpointEngineRegistry.new("cpu", bucket_size=1 << 20, **options) for _ in range(n)]


@pytest.mark.parametrize(("ranks", "servers"), [(1, 1), (2, 3)])
def test_every_server_gets_every_weight_time_and_again(ranks, servers):
    senders = [*engines(1, is_master=True), *engines(ranks - 1, is_master=False)]
    receivers = engines(servers)
    for factor in (1, 2):
        weights = {name: tensor * factor for name, tensor in WEIGHTS.items()}
        received = asyncio.run(delivery(senders, receivers, weights))
        assert len(received) == servers
        for of_server in received:
            assert list(of_server) == list(weights)
            for name, tensor in of_server.items():
                assert tensor.dtype == weights[name].dtype and tensor.equal(weights[name]), name


def test_more_tensors_than_a_receiver_has_room_for():
    weights = {f"layer {i}": torch.full((100,), float(i)) for i in range(50)}
    (received,) = asyncio.run(delivery(engines(1, is_master=True), engines(1), weights))
    assert [tensor[0].item() for tensor in received.values()] == list(range(50))
