"""Sends weights through sockets from a trainer to separate servers on CPUs: `rollout.checkpoint_engine.backend=cpu`.

    trainer, rank 0 ──┬─ socket ──> worker of server 1 ── shared memory ──> vLLM
                      └─ socket ──> worker of server 2 ── shared memory ──> vLLM

Upstream (verl 0.9.1) has engines for NCCL, NIXL and others, all of which need a GPU or an NPU. A delivery follows
upstream's protocol: every worker opens a port (`prepare`); the topology tells the sender the receivers' ports; the
tensors follow one after the other, and an end mark; `finalize` closes the sockets.

`schedule=separate_async` chooses this engine on CPUs. Every worker imports this module, because
`rollout.checkpoint_engine.custom_backend_module` names it.
"""

from collections.abc import AsyncIterator, Iterable

import numpy as np
import ray
import torch
import zmq
import zmq.asyncio
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

# largest number of tensors queued for a receiver that is slower than the sender
QUEUED_TENSORS = 8


@CheckpointEngineRegistry.register("cpu")
class CPUCheckpointEngine(CheckpointEngine):
    """One process's end of the sockets, which carry whole tensors. Only the trainer's rank 0, the master, sends; its
    other ranks only take part in gathering."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.is_master = is_master
        self.sockets: list[zmq.asyncio.Socket] = []

    def prepare(self) -> str:
        """Open a port for weights, and return its address, such as `tcp://10.0.0.2:40123`."""
        host = ray.util.get_node_ip_address().strip("[]")
        host = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        (socket,) = self.sockets = [self._socket(zmq.PULL)]
        return f"{host}:{socket.bind_to_random_port(host)}"

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.set_hwm(QUEUED_TENSORS)
        return socket

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str]
    ) -> tuple[dict[str, list], dict[str, list]]:
        """Return `init_process_group`'s arguments for the trainer's ranks, and those for the rollout workers: the
        trainer's rank 0 sends to every rollout worker. `metadata` are the results of `prepare` in the same order."""
        receivers = metadata[actor_wg_world_size:]
        to = [receivers, *[[]] * (actor_wg_world_size - 1)]
        return {"send_to": to}, {"send_to": [[]] * rollout_world_size}

    def init_process_group(self, send_to: list[str]) -> None:
        if not send_to:
            return
        self.finalize()  # a sender does not need the port that `prepare` has opened
        for address in send_to:
            self.sockets.append(self._socket(zmq.PUSH))
            self.sockets[-1].connect(address)

    def finalize(self) -> None:
        """Close the sockets; messages that were already sent still arrive."""
        for socket in self.sockets:
            socket.close()
        self.sockets = []

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Send the tensors one by one; all ranks of the trainer must call this, as they gather tensors together."""
        for name, tensor in weights:
            if self.is_master:
                whole = tensor.detach().contiguous()
                await self._send((name, whole.dtype, whole.shape), whole.view(-1).view(torch.uint8).numpy())
        if self.is_master:
            await self._send(None)

    async def _send(self, meta: tuple | None, data: np.ndarray | None = None) -> None:
        for socket in self.sockets:
            await socket.send_pyobj(meta, zmq.SNDMORE if meta else 0)
            if meta:
                await socket.send(data, copy=True)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        (socket,) = self.sockets
        while meta := await socket.recv_pyobj():
            name, dtype, shape = meta
            data = bytearray(await socket.recv())
            yield name, torch.frombuffer(data, dtype=dtype).view(shape)
