"""A torch device module for the CPU, with the functions of torch.cuda that verl calls.

It is always available and holds a single device, `cpu`, whose name is the type of the processor, such as x86_64.
Allocated device memory is the resident set of this process; its limit is the machine's memory.
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
    """Do nothing; stands in for device functions that a CPU does not need."""


set_device = empty_cache = ipc_collect = nothing
set_per_process_memory_fraction = reset_peak_memory_stats = nothing


def memory_allocated(device=None) -> int:
    """Return the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


memory_reserved = memory_allocated


def max_memory_allocated(device=None) -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


max_memory_reserved = max_memory_allocated


def mem_get_info(device=None) -> tuple[int, int]:
    """Return the machine's available and total memory in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total
