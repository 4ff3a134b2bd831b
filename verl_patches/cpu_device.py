"""The functions of a torch device module, such as torch.cuda, that verl calls, for the CPU.

Allocated device memory is the resident set of this process, and the limit is the machine's memory.
"""

import platform
import resource

import psutil
import torch
from torch import get_rng_state, manual_seed, set_rng_state
from torch.cpu import Stream, current_stream, stream, synchronize

__all__ = ["Stream", "current_stream", "get_rng_state", "manual_seed", "set_rng_state", "stream", "synchronize"]

manual_seed_all = manual_seed


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> torch.device:
    return torch.device("cpu")


def get_device_name(device=None) -> str:
    return platform.processor() or platform.machine()


def nothing(*args, **kwargs) -> None:
    """What a device does that a CPU need not do."""


set_device = empty_cache = ipc_collect = nothing
set_per_process_memory_fraction = reset_peak_memory_stats = nothing


def memory_allocated(device=None) -> int:
    """The bytes of this process that are in memory."""
    return psutil.Process().memory_info().rss


memory_reserved = memory_allocated


def max_memory_allocated(device=None) -> int:
    """The most bytes of this process that have been in memory."""
    # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


max_memory_reserved = max_memory_allocated


def mem_get_info(device=None) -> tuple[int, int]:
    """The available and the total bytes of the machine's memory."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total
