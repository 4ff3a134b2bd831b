"""A model that upstream's patched functions change, on one rank."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@pytest.fixture
def sharded(tmp_path):
    """An FSDP2 model on the CPU, where parameters lie with `param_offload=true`; its weights are 1."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        yield fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()
