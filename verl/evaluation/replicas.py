"""How many replicas of the model an evaluation's server has: by default as many as fit on the GPUs of this machine.

The server is vLLM's own, with `--data-parallel-size`: one address, and each request goes to the replica that has the
fewest waiting and running (vLLM 0.24 and 0.30; replicas of a dense model share nothing, and on one machine no port is
fixed). A sample's seed travels with its request, so it does not matter who answers.
"""

import os
import resource

from omegaconf import DictConfig

SPARE_FILES = 256  # of the process itself, of tools and of the judge's connections


def visible_gpus() -> int | None:
    """GPUs that CUDA_VISIBLE_DEVICES leaves, counted without initializing CUDA; None on the CPU profile."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        return None
    import torch

    return torch.cuda.device_count()


def replicas_of(server: DictConfig, gpus: int | None) -> int:
    """`server.data_parallel`, or, where it is null, as many as there are GPUs for; at least 1."""
    if server.data_parallel is not None:
        return server.data_parallel
    return 1 if gpus is None else max(1, gpus // server.tensor_parallel)


def check_gpus(server: DictConfig, gpus: int | None) -> None:
    """
    Raises:
        ValueError: the server needs more GPUs than there are.
    """
    replicas = replicas_of(server, gpus)
    needed = server.tensor_parallel * replicas
    if gpus is not None and needed > gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ValueError(
            f"server.tensor_parallel={server.tensor_parallel} x server.data_parallel={replicas}: GPUs needed: "
            f"{needed}, visible here: {gpus} (CUDA_VISIBLE_DEVICES: {visible}); lower them, or set server.url"
        )


def describe_server(server: DictConfig, gpus: int | None) -> str:
    """The server that would be started, in one line; or why it cannot be."""
    try:
        check_gpus(server, gpus)
    except ValueError as error:
        return f"none can start: {error}"
    replicas = replicas_of(server, gpus)
    devices = "the CPU" if gpus is None else f"{server.tensor_parallel * replicas} of {gpus} GPUs"
    return (
        f"data_parallel={replicas}, tensor_parallel={server.tensor_parallel} on {devices}, "
        f"{server.concurrency * replicas} requests at once"
    )


def allow_open_files(connections: int) -> None:
    """Raise this process's limit on open files, where it is too low for so many connections.

    Raises:
        ValueError: the limit that only an administrator can raise is too low.
    """
    needed = connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"server.concurrency: {connections} requests at once need {needed} open files, and {hard} are allowed here "
            "(ulimit -Hn): lower it"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
