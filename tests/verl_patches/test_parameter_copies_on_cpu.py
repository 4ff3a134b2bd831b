"""Versions of the parameters that `schedule=separate_async` keeps and restores, where the parameters lie on the CPU."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from verl.utils import fsdp_utils


@pytest.fixture
def model(tmp_path):
    """An FSDP2 model on one rank, as it lies between two calls with `param_offload=true`; its weight is 1."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        yield fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()


def test_updates_survive_a_look_at_an_older_policy(model):
    """Upstream's order in the second update of a step: keep 1, go back to 0, go on from 1."""
    versions = [fsdp_utils.fsdp2_sharded_save_to_cpu(model)]
    with torch.no_grad():
        model.weight.add_(1)
    versions.append(fsdp_utils.fsdp2_sharded_save_to_cpu(model))
    weights = []
    for version in versions:
        fsdp_utils.fsdp2_sharded_load_from_cpu(model, *version)
        weights.append(model.weight.to_local().item())
    assert weights == [1, 2]
