"""Chooses the number of model replicas in an evaluation's server: by default as many as this machine's GPUs can hold.

The server is vLLM's own with `--data-parallel-size`. It has one address and gives each request to the replica with the
fewest waiting and running requests (vLLM 0.24 and 0.30; replicas of a dense model share nothing, and on one machine no
port is fixed). Every request has its sample's seed, so that it does not matter which replica answers.
"""

import os
import resource

from omegaconf import DictConfig

SPARE_FILES = 256  # for the process itself, for tools and for connections to the judge


def visible_gpus() -> int | None:
    """Return the number of visible GPUs without initializing CUDA; None on the CPU profile, VERL_PLATFORM=cpu."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        return None
    import torch

    return torch.cuda.device_count()


def replicas_of(server: DictConfig, gpus: int | None) -> int:
    """Return `server.data_parallel`; if it is null, the number of replicas that the GPUs can hold, at least 1."""
    if server.data_parallel is not None:
        return server.data_parallel
    return 1 if gpus is None else max(1, gpus // server.tensor_parallel)


def gpu_problem(server: DictConfig, gpus: int | None) -> str | None:
    """Return why the server cannot start on this number of GPUs (None: the CPU profile); None if it can."""
    replicas = replicas_of(server, gpus)
    needed = server.tensor_parallel * replicas
    if gpus is None or needed <= gpus:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"server.tensor_parallel={server.tensor_parallel} x server.data_parallel={replicas}: GPUs needed: "
        f"{needed}, visible here: {gpus} (CUDA_VISIBLE_DEVICES: {visible}); lower them, or set server.url"
    )


def describe_server(server: DictConfig, gpus: int | None) -> str:
    """Return a line about the server that would be started, or about why it cannot start."""
    if problem := gpu_problem(server, gpus):
        return f"none can start: {problem}"
    replicas = replicas_of(server, gpus)
    devices = "the CPU" if gpus is None else f"{server.tensor_parallel * replicas} of {gpus} GPUs"
    return (
        f"data_parallel={replicas}, tensor_parallel={server.tensor_parallel} on {devices}, "
        f"{server.concurrency * replicas} requests at once"
    )


def allow_open_files(connections: int) -> None:
    """Raise this process's limit on open files if it is too low for this many connections."""
    needed = connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"server.concurrency: {connections} requests at once need {needed} open files, and {hard} are allowed here "
            "(ulimit -Hn): lower it"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
