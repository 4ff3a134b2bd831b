"""Checks that Ray, the machine and the config agree about nodes, GPUs and CPUs."""

import os
import shutil
import sysconfig
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from ray._private.utils import get_num_cpus

from verl.trainer.checks.resources.disk import check_shared_memory
from verl.workers.config.schedule import rollout_workers

# CPUs that upstream's ResourcePoolManager reserves beside each worker's GPU (`max_colocate_count`), and beside
# the GPU of a server that shares its GPU with no worker.
CPUS_PER_WORKER, CPUS_PER_SERVER = 3, 2
# Variables of the user's command that the processes of a running cluster get: these, and NCCL's settings.
CARRIED = ("HF_TOKEN", "WANDB_API_KEY", "BRIGHTDATA_API_KEY", "BRIGHTDATA_ZONE")


def config_asks_for_cpu(config: DictConfig) -> bool:
    """Return whether the config sets VERL_PLATFORM=cpu for Ray's processes, as the profile `hardware=cpu` does."""
    return OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM") == "cpu"


def needed_ray_cpus(config: DictConfig) -> int:
    """Return the number of Ray's logical CPUs that verl 0.9.1 holds at once: those of TransferQueue's actors and of the
    workers' bundles, and one more, because an actor without `num_cpus` needs a CPU to be placed, though none to run."""
    units = OmegaConf.select(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", default=0)
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    return 1 + units + CPUS_PER_WORKER * workers + CPUS_PER_SERVER * rollout_workers(config) + 1


def joins_running_cluster(config: DictConfig) -> bool:
    """Return whether the config or the environment names a Ray cluster to connect to."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return address not in (None, "", "local")


def check_ray_resources(config: DictConfig, starting: bool = True) -> None:
    """Check that a Ray cluster that this run starts has enough CPUs; a running one is not asked. In a dry run
    (`starting` is false), which may be on another machine, only the config's numbers count."""
    if joins_running_cluster(config):
        return
    cpus, needed = config.ray_kwargs.get("ray_init", {}).get("num_cpus"), needed_ray_cpus(config)
    if cpus is None and starting and config.trainer.nnodes == 1:
        cpus = get_num_cpus()  # Ray's own count, which is a container's limit where there is one
    if cpus is not None and cpus < needed:
        raise ValueError(
            f"ray_kwargs.ray_init.num_cpus={cpus}, but this run holds {needed} of Ray's logical CPUs and would wait "
            f"forever: set at least {needed}, or lower transfer_queue.backend.SimpleStorage.num_data_storage_units"
        )


def check_own_machine(config: DictConfig) -> None:
    """Check that a run that starts Ray on this machine alone has enough nodes, GPUs and shared memory, and
    what Triton needs."""
    import torch

    if joins_running_cluster(config):
        return
    nodes, gpus = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes > 1:
        raise ValueError(
            f"trainer.nnodes={nodes}: no Ray cluster is named, and this machine is one node. Start a cluster and name "
            "it by RAY_ADDRESS (docs/several_nodes.md), or set NNODES=1"
        )
    if not config_asks_for_cpu(config) and gpus > torch.cuda.device_count():
        raise ValueError(
            f"trainer.n_gpus_per_node={gpus}, and torch sees {torch.cuda.device_count()} GPUs here: set N_GPUS_PER_NODE"
        )
    check_shared_memory(config)
    if config.trainer.device != "cuda":
        return
    # Triton builds a module at its first kernel.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise ValueError("Triton needs a C compiler, and there is no gcc or clang: apt-get install gcc, or set CC")
    if not (header := Path(sysconfig.get_path("include"), "Python.h")).exists():
        raise ValueError(f"Triton needs Python's headers, and {header} does not exist: apt-get install python3-dev")


def carry_environment(config: DictConfig) -> None:
    """Let `ray.init` give a running cluster's processes the variables in `CARRIED`, and NCCL's. They are secrets in
    part, so that they pass by Ray's hook. The config would be printed and logged."""
    if joins_running_cluster(config):
        os.environ.setdefault("RAY_RUNTIME_ENV_HOOK", f"{__name__}.{with_carried.__name__}")


def with_carried(runtime_env: dict | None) -> dict:
    """Return a Ray runtime environment with the variables of this process to carry; those already there win."""
    carried = {name: value for name, value in os.environ.items() if name in CARRIED or name.startswith("NCCL_")}
    return {**(runtime_env or {}), "env_vars": carried | ((runtime_env or {}).get("env_vars") or {})}
