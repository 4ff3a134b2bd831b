"""Two repairs that let a trainer load new weights into vLLM 0.30's running CPU engine.

Both are for VERL_PLATFORM=cpu only and are applied by `vllm_patches.register` before the model loads.
"""

import torch


def _linear_with_the_live_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Compute the layer with `torch.nn.functional.linear` on the parameter that weight loading fills."""
    layer.cpu_linear = torch.nn.functional.linear


def keep_linear_weights_loadable() -> None:
    """Replace `dispatch_cpu_unquantized_gemm`, which repacks linear weights after the first load.

    vLLM 0.30 packs each weight for oneDNN and frees the parameter, loader included, so a second
    `load_weights` fails with "'Parameter' object has no attribute 'weight_loader'". Can go when vLLM's CPU
    backend repacks after a reload.
    """
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise AttributeError(
            f"{utils.__name__}.dispatch_cpu_unquantized_gemm is gone: vLLM has moved, adapt {__name__}"
        )
    utils.dispatch_cpu_unquantized_gemm = _linear_with_the_live_weight


def receive_copies_of_shared_memory() -> None:
    """Hand copies of received weights to vLLM instead of views of the shared memory segment.

    verl 0.9.1 relies on `.to(device)` for the copy, which copies nothing on CPU: views outlive the segment,
    and closing it raises "BufferError: cannot close exported pointers exist". Can go when upstream clones.
    """
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

    upstream_receiver = bucketed_weight_transfer.BucketedWeightReceiver

    class CopyingWeightReceiver(upstream_receiver):
        def receive_weights(self, on_bucket_received):
            def on_copies(weights, is_last):
                on_bucket_received([(name, tensor.clone()) for name, tensor in weights], is_last)

            return super().receive_weights(on_copies)

    bucketed_weight_transfer.BucketedWeightReceiver = CopyingWeightReceiver
