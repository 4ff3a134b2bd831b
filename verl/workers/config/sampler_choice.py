"""Chooses how vLLM samples at an adaptive temperature, which differs between its two model runners.

The V2 runner does it in its sampler (`vllm_patches/v2_adaptive_temperature.py`). The V1 runner needs a logits
processor, which the engine's config must name; vLLM never uses the V2 runner for an engine that names one. A wrong
choice here cannot go unnoticed: the server refuses the requests (`vllm_patches/tempered_requests.py`).
"""

import ast
import importlib.util
import os
from collections.abc import Collection
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.workers.config.keys import ROLLOUT
from vllm_patches.tempered_requests import PROCESSOR

PROCESSORS = f"{ROLLOUT}.engine_kwargs.vllm.logits_processors"
SEEDS = f"{ROLLOUT}.custom.request_seeds"
# name in vLLM 0.24's config/vllm.py; 0.30 uses the V2 runner for every architecture and has no such name
LISTED = "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"


def listed_architectures(vllm: Path) -> frozenset[str] | None:
    """Return the architectures for which a vLLM uses its V2 runner; None if it does so for all.

    They are read from vLLM's source, because importing vLLM would take the driver seconds.

    Args:
        vllm: folder of the package.

    Raises:
        ValueError: the source assigns something other than a frozenset of names: vLLM has changed.
    """
    for node in ast.parse((vllm / "config/vllm.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == LISTED:
            return frozenset(ast.literal_eval(ast.unparse(node.value).removeprefix("frozenset")))
    return None


def installed_vllm() -> Path | None:
    """Return the folder of the installed vLLM, without importing it; None if there is none."""
    package = importlib.util.find_spec("vllm")
    return Path(package.submodule_search_locations[0]) if package and package.submodule_search_locations else None


def takes_v2_runner(architectures: Collection[str]) -> bool:
    """Return whether the installed vLLM uses its V2 runner for a model on GPUs if no logits processor is named.

    The environment variable VLLM_USE_V2_MODEL_RUNNER decides if it is set. The result is False without vLLM.
    """
    if (forced := os.environ.get("VLLM_USE_V2_MODEL_RUNNER")) is not None:
        return forced != "0"
    if (vllm := installed_vllm()) is None:
        return False
    listed = listed_architectures(vllm)
    return listed is None or not listed.isdisjoint(architectures)


def choose_sampler(config: DictConfig, model: dict | None) -> None:
    """Name the logits processor in the engine's config if the run samples at an adaptive temperature on the V1 runner.

    `model` is the content of the model's config.json; None if that is not on this machine.
    """
    if not config.actor_rollout_ref.rollout.get("adaptive_temperature"):
        return
    processors = list(OmegaConf.select(config, PROCESSORS) or [])
    on_gpus = config.trainer.device == "cuda"
    if not processors and on_gpus and takes_v2_runner((model or {}).get("architectures") or ()):
        return
    if PROCESSOR not in processors:
        OmegaConf.update(config, PROCESSORS, [*processors, PROCESSOR], force_add=True)


def choose_seeds(config: DictConfig, model: dict | None) -> None:
    """Set `rollout.custom.request_seeds` (whether each request to vLLM has its own seed) unless the user has set it.

    It is set to true on CPUs, with `rollout.full_determinism`, and on vLLM's V2 runner, where seeds cost nothing. It is
    false on the V1 runner, which launches one kernel per seeded request and step, up to 1,024. Seeds make a run on CPUs
    reproducible, but not one on GPUs, where a request's logits depend on its batch. Call `choose_sampler` first.
    """
    if OmegaConf.select(config, SEEDS) is not None:
        return
    seeds = config.trainer.device != "cuda" or bool(config.actor_rollout_ref.rollout.get("full_determinism"))
    if not seeds and not OmegaConf.select(config, PROCESSORS):
        seeds = takes_v2_runner((model or {}).get("architectures") or ())
    OmegaConf.update(config, SEEDS, seeds, force_add=True)


def describe_sampler(config: DictConfig) -> str:
    """Return a phrase for the user: the temperature of training rollouts, and whether each request has its own seed.

    For an adaptive temperature it also names vLLM's runner. Call `choose_sampler` and `choose_seeds` first.
    """
    rollout = config.actor_rollout_ref.rollout
    seeds = ", a seed for each request" if OmegaConf.select(config, SEEDS) else ", no seeds"
    if not rollout.get("adaptive_temperature"):
        return f"temperature {rollout.temperature}{seeds}"
    way = "V1 runner, by a logits processor" if OmegaConf.select(config, PROCESSORS) else "V2 runner, by its sampler"
    return f"adaptive temperature (tau {rollout.temperature_tau}) on vLLM's {way}{seeds}"
