"""Makes the parameters that `schedule=separate_async` saves before its updates independent copies."""

from types import ModuleType

import torch


def save_copies(fsdp_utils: ModuleType) -> None:
    """Replace verl 0.9.1's `fsdp2_sharded_save_to_cpu` by a function whose result later updates do not change.

    Upstream relies on `.cpu()` to copy, which returns tensors that are on the CPU already as they are: on the CPU
    platform, and on GPUs with `param_offload=true`. Old log-probabilities would be those of the newest policy, and all
    updates of a step except the last would be lost. This can go when upstream clones.
    """
    save = fsdp_utils.fsdp2_sharded_save_to_cpu

    def save_to_cpu(model):
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # offloading to the CPU does not wait for its copies
        state, spec = save(model)
        return {name: (tensor.clone(), own_spec) for name, (tensor, own_spec) in state.items()}, spec

    vars(fsdp_utils)["fsdp2_sharded_save_to_cpu"] = save_to_cpu
