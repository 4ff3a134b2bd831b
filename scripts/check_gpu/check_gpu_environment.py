"""Prints the versions, driver and GPUs of a machine, and problems with its GPU setup; a part of check_gpu.sh.

The exit code is 0, or 1 if there is a problem, or 3 if torch sees no GPU. With DRY_RUN=1 it is always 0.
"""

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys

# major version of CUDA -> major version of the oldest driver for it
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
PACKAGES = ("torch", "transformers", "vllm", "verl", "flash-attn", "ray", "tensordict", "TransferQueue")
NO_GPU = 3


def driver_version() -> str | None:
    """Return the driver's version from nvidia-smi, such as 580.65.06; None if nvidia-smi does not run."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def driver_problem(driver: str | None, cuda: str | None) -> str | None:
    """Return the reason why torch cannot use the driver; None if it can.

    Args:
        cuda: torch's CUDA version, such as 13.0; None for a CPU build of torch.
    """
    if cuda is None:
        return "torch is a CPU build: install the GPU extra into an environment of its own"
    if driver is None:
        return "nvidia-smi does not run: is there a driver?"
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if oldest is not None and int(driver.split(".")[0]) < oldest:
        return f"driver {driver} is too old for CUDA {cuda}: it needs r{oldest} or newer"
    return None


def import_problem(module: str) -> str | None:
    """Return why a module cannot be imported, for example because its wheel needs another torch; None if it can."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"import {module}: {str(error).splitlines()[0]}"
    return None


def compilers() -> str:
    """Return where nvcc (for FlashInfer's kernels), gcc (for Triton) and ninja (for torch extensions) are installed."""
    paths = {name: shutil.which(name) for name in ("nvcc", "gcc", "ninja")}
    return ", ".join(f"{name} {path or 'is not in the path'}" for name, path in paths.items())


def installed(package: str) -> str:
    """Return a package's version, or `not installed`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    import torch

    driver, versions = driver_version(), {package: installed(package) for package in PACKAGES}
    problems = [driver_problem(driver, torch.version.cuda), import_problem("flash_attn")]
    problems += [f"{package} is not installed" for package in ("vllm", "verl") if versions[package] == "not installed"]
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        problems.append(f"Python {platform.python_version()}: expected 3.10 to 3.12")
    print(f"Python {platform.python_version()}, {sys.executable}")
    print(", ".join(f"{package} {version}" for package, version in versions.items()))
    print(f"driver {driver}, CUDA of torch {torch.version.cuda}")
    print(compilers())
    gpus = range(torch.cuda.device_count())
    for gpu in map(torch.cuda.get_device_properties, gpus):
        print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}")
    if not gpus:
        problems.append("torch sees no GPU")
    for problem in filter(None, problems):
        print(f"error: {problem}")
    if os.environ.get("DRY_RUN", "0") not in ("", "0") or not any(problems):
        return 0
    return 1 if gpus else NO_GPU


if __name__ == "__main__":
    sys.exit(main())
