"""Lets a trainer load new weights into vLLM 0.30's running CPU engine; for VERL_PLATFORM=cpu only.

vLLM 0.30 packs each linear weight for oneDNN after the first load and frees the parameter with its loader, so that a
second `load_weights` fails with "'Parameter' object has no attribute 'weight_loader'". This can go when vLLM's CPU
backend packs weights again after a reload.
"""

import torch


def _linear_with_the_live_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Let the layer call `torch.nn.functional.linear` on the parameter that reloads write to."""
    layer.cpu_linear = torch.nn.functional.linear


def keep_linear_weights_loadable() -> None:
    """Replace `dispatch_cpu_unquantized_gemm`, which packs the weights, before the model loads."""
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise AttributeError(f"{utils.__name__}.dispatch_cpu_unquantized_gemm is gone: adapt {__name__}")
    utils.dispatch_cpu_unquantized_gemm = _linear_with_the_live_weight
