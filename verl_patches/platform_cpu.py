"""The CPU as a verl platform, with real FSDP on gloo, vLLM's CPU build, and Ray's logical GPUs as slots for workers.

Only VERL_PLATFORM=cpu chooses it; the profile `hardware=cpu` sets this variable and forwards it to all processes. The
absence of a GPU must not choose it, because torch sees no CUDA in a Ray actor without GPUs even on a GPU node.
"""

import os
from contextlib import nullcontext
from types import ModuleType
from unittest.mock import patch

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, platform_manager, set_platform

from verl_patches import cpu_device
from vllm_patches import cpu_version_name

CHUNK_ELEMENTS = 2**22  # logits of one call, 16 MiB in float32


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The host's CPU as a single device without an index."""

    device_name = vendor_name = "cpu"
    device_module = cpu_device
    set_device = synchronize = set_allocator_settings = empty_cache = cpu_device.nothing
    profiler_start = profiler_stop = cudart = cpu_device.nothing
    is_available = staticmethod(cpu_device.is_available)
    device_count = staticmethod(cpu_device.device_count)
    # a device instead of an index, because callers pass it to `.to()`, where 0 would mean cuda:0
    current_device = staticmethod(cpu_device.current_device)
    manual_seed = manual_seed_all = staticmethod(cpu_device.manual_seed)

    def is_platform_available(self, use_smi_check=False) -> bool:
        """Return False: only VERL_PLATFORM=cpu chooses this platform, never upstream's detection."""
        return False

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # Ray sets it for logical GPUs too

    def nvtx_range(self, msg: str):
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"  # ray_kwargs.ray_init.num_gpus sets the number of logical GPUs

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # upstream then sends weights through shared memory


def use_plain_gloo_process_group(distributed: ModuleType) -> None:
    """Replace verl 0.9.1's backend string `cpu:gloo,<device>:<backend>` by `gloo`. On CPU that string names the device
    cpu twice, which torch refuses. One of upstream's functions takes an argument `backend`, the other builds the string
    itself; both are wrapped here. This can go when upstream omits the second half for the device cpu."""
    original_ray = distributed.initialize_global_process_group_ray
    original_torchrun = distributed.initialize_global_process_group

    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return original_ray(timeout_second=timeout_second, backend=backend or "gloo")

    def initialize_global_process_group(*args, **kwargs):
        init_process_group = torch.distributed.init_process_group

        def with_gloo(backend=None, **init_kwargs):
            return init_process_group(backend="gloo", **init_kwargs)

        with patch.object(torch.distributed, "init_process_group", with_gloo):
            return original_torchrun(*args, **kwargs)

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray
    distributed.initialize_global_process_group = initialize_global_process_group


def poll_replay_buffer_often(replay_buffer: ModuleType) -> None:
    """Look for finished rollouts ten times a second instead of every two seconds (verl 0.9.1). On CPU a step takes
    about as long as upstream's poll interval. This can go when a config key sets the interval."""
    buffer_class = replay_buffer.ReplayBuffer
    wait_for_next_poll = buffer_class._wait_for_next_poll

    def wait_shortly(self, partition_id, last_debug_time):
        self.poll_interval = min(self.poll_interval, 0.1)
        return wait_for_next_poll(self, partition_id, last_debug_time)

    buffer_class._wait_for_next_poll = wait_shortly


def keep_the_reference_policy_where_it_is(fsdp_engine: ModuleType) -> None:
    """Shard forward-only models without an offload policy; verl 0.9.1 gives them one that pins the host's memory.
    Pinning fails without an accelerator ("Cannot access accelerator device when none is available"), and on CPU nothing
    needs offloading. This can go when upstream pins only with an accelerator."""
    if not callable(fsdp_engine.CPUOffloadPolicy):
        raise AttributeError(f"{fsdp_engine.__name__}.CPUOffloadPolicy is gone: verl has moved, adapt {__name__}")
    fsdp_engine.CPUOffloadPolicy = lambda pin_memory=True: None


def receive_copies_of_shared_memory(bucketed_weight_transfer: ModuleType) -> None:
    """Hand copies of received weights to vLLM instead of views of the shared memory segment.

    verl 0.9.1 relies on `.to(device)` to copy, which does not copy on CPU: the views outlive the segment, and closing
    it raises "BufferError: cannot close exported pointers exist". The same error hides an exception of vLLM's loader,
    whose traceback holds the views; here the loader's exception is raised instead. This can go when upstream clones.
    """

    class CopyingWeightReceiver(bucketed_weight_transfer.BucketedWeightReceiver):
        def receive_weights(self, on_bucket_received):
            errors: list[Exception] = []

            def on_copies(weights, is_last):
                try:
                    on_bucket_received([(name, tensor.clone()) for name, tensor in weights], is_last)
                except Exception as error:
                    errors.append(error)
                    raise

            try:
                return super().receive_weights(on_copies)
            except BufferError as error:
                raise (errors or [error])[0] from None

    bucketed_weight_transfer.BucketedWeightReceiver = CopyingWeightReceiver


def take_logsumexp_of_many_tokens(torch_functional: ModuleType) -> None:
    """Compute log-probabilities with a call of logsumexp for many tokens; values and gradients are upstream's, exactly.

    verl 0.9.1 calls it for each row of the logits. In packed sequences a row is a token, and with a small model the
    calls take longer than the computation. This can go when upstream takes many rows at once.
    """
    original = torch_functional.logprobs_from_logits_v2

    def logprobs_from_logits_v2(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.dtype not in (torch.float32, torch.float64):
            return original(logits, labels)
        rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
        norms = torch.cat([chunk.logsumexp(-1) for chunk in logits.flatten(0, -2).split(rows)])
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - norms.view_as(labels)

    torch_functional.logprobs_from_logits_v2 = logprobs_from_logits_v2


# upstream's module -> function that repairs it once it has been imported
REPAIRS = {
    "verl.utils.torch_functional": take_logsumexp_of_many_tokens,
    "verl.utils.distributed": use_plain_gloo_process_group,
    "verl.trainer.ppo.v1.replay_buffer": poll_replay_buffer_often,
    "verl.workers.engine.fsdp.transformer_impl": keep_the_reference_policy_where_it_is,
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": receive_copies_of_shared_memory,
}


def make_current() -> bool:
    """Make CPU the platform of this process, and by VERL_PLATFORM of its children; return False if it already is."""
    if isinstance(platform_manager._current_platform, PlatformCPU):
        return False
    os.environ["VERL_PLATFORM"] = "cpu"
    # This is upstream's own override; its FSDP engines are registered for cuda and npu only.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    set_platform(PlatformCPU())
    cpu_version_name.install()
    return True
