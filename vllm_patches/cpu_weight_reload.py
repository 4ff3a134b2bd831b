"""A repair that lets a trainer load new weights into vLLM 0.30's running CPU engine.

It is for VERL_PLATFORM=cpu only; `vllm_patches.register` applies it before the model loads.
"""

import torch


def _linear_with_the_live_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Let the layer call `torch.nn.functional.linear` on the parameter that reloads write to."""
    layer.cpu_linear = torch.nn.functional.linear


def keep_linear_weights_loadable() -> None:
    """Let linear layers call `torch.nn.functional.linear` on weights that can be loaded again.

    This replaces `dispatch_cpu_unquantized_gemm`, which repacks linear weights after the first load. vLLM 0.30 packs
    each weight for oneDNN and frees the parameter with its loader, so that a second `load_weights` fails with
    "'Parameter' object has no attribute 'weight_loader'". This can go when vLLM's CPU backend packs weights again after
    a reload.
    """
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise AttributeError(
            f"{utils.__name__}.dispatch_cpu_unquantized_gemm is gone: vLLM has moved, adapt {__name__}"
        )
    utils.dispatch_cpu_unquantized_gemm = _linear_with_the_live_weight
