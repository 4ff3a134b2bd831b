"""Versions of the parameters that `schedule=separate_async` keeps and restores, where the parameters lie on the CPU."""

import torch

from verl.utils import fsdp_utils


def test_updates_survive_a_look_at_an_older_policy(sharded):
    """Upstream's order in the second update of a step: keep 1, go back to 0, go on from 1."""
    versions = [fsdp_utils.fsdp2_sharded_save_to_cpu(sharded)]
    with torch.no_grad():
        sharded.weight.add_(1)
    versions.append(fsdp_utils.fsdp2_sharded_save_to_cpu(sharded))
    weights = []
    for version in versions:
        fsdp_utils.fsdp2_sharded_load_from_cpu(sharded, *version)
        weights.append(sharded.weight.to_local()[0, 0].item())
    assert weights == [1, 2]
