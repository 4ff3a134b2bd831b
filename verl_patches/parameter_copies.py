"""What a trainer of `schedule=separate_async` keeps of the parameters from before its updates is a copy."""

from types import ModuleType

import torch


def save_copies(fsdp_utils: ModuleType) -> None:
    """Replace verl 0.9.1's `fsdp2_sharded_save_to_cpu` by one whose result no update changes.

    Upstream relies on `.cpu()` to copy, which does not copy what lies on the CPU already: on the CPU platform, and on
    GPUs with `param_offload=true`. What is kept would change with the updates, so that old log-probabilities would be
    those of the newest policy, and restoring one version would overwrite the others: of a step's updates all but the
    last would be lost. This can go when upstream clones.
    """
    save = fsdp_utils.fsdp2_sharded_save_to_cpu

    def save_to_cpu(model):
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # offloading to the CPU does not wait for its copies
        state, spec = save(model)
        return {name: (tensor.clone(), own_spec) for name, (tensor, own_spec) in state.items()}, spec

    vars(fsdp_utils)["fsdp2_sharded_save_to_cpu"] = save_to_cpu
