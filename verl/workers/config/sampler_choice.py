"""Chooses how vLLM samples at an adaptive temperature, which differs between its two model runners.

The V2 runner does it in its sampler (`vllm_patches/v2_adaptive_temperature.py`). The V1 runner needs a logits
processor, which the engine's config must name; vLLM never uses the V2 runner for an engine that names one. A wrong
choice here cannot go unnoticed: the server refuses the requests (`vllm_patches/tempered_requests.py`).
"""

import ast
import importlib.util
import os
from importlib.metadata import entry_points
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from verl.workers.config.explore import needs_answers
from verl.workers.config.keys import ROLLOUT
from verl.workers.rollout.engines.interface import MAX_SCORED_TOKENS
from vllm_patches.tempered_requests import PROCESSOR

ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
PROCESSORS = f"{ENGINE}.logits_processors"
SEEDS = f"{ROLLOUT}.custom.request_seeds"
RUNNER = f"{ROLLOUT}.custom.vllm_runner"
FORCED = "VLLM_USE_V2_MODEL_RUNNER"
# Options of vLLM, and the values with which it does not use its V2 runner.
V1_OPTIONS: dict[str, tuple] = {
    "compilation_config.mode": (1, "STOCK_TORCH_COMPILE"),
    "enable_elastic_ep": (True,),
    "speculative_config.method": ("ngram", "ngram_gpu", "draft_model", "suffix", "medusa", "mlp_speculator"),
}
# The same for one of the two versions: 0.24, which has a list of architectures, and 0.30.
V1_OPTIONS_0_24 = {
    **dict.fromkeys(("enable_dbo", "enable_prompt_embeds", "kv_sharing_fast_prefill"), (True,)),
    "enable_return_routed_experts": (True,),
    "logprobs_mode": ("raw_logits", "processed_logits"),
}
V1_OPTIONS_0_30 = {"mamba_cache_mode": ("all",)}
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


def needs_architectures(config: DictConfig) -> bool:
    """Return whether the model runner depends on the model's architectures: on GPUs, if the installed vLLM has a list
    of them and no environment variable decides."""
    vllm = installed_vllm() if config.trainer.device == "cuda" and FORCED not in os.environ else None
    return vllm is not None and listed_architectures(vllm) is not None


def takes_v2_runner(config: DictConfig, model: dict | None) -> bool:
    """Return whether the installed vLLM uses its V2 runner for the run's engines.

    The environment variable VLLM_USE_V2_MODEL_RUNNER decides if it is set. The result is False on CPUs and without
    vLLM. A machine without a GPU may lack Triton, which vLLM's V2 runner needs, because only the workers have it.
    """
    if config.trainer.device != "cuda":
        return False
    if (forced := os.environ.get(FORCED)) is not None:
        return forced != "0"
    if (vllm := installed_vllm()) is None or (torch.cuda.is_available() and not importlib.util.find_spec("triton")):
        return False
    listed = listed_architectures(vllm)
    named = OmegaConf.select(config, f"{ENGINE}.hf_overrides.architectures") or (model or {}).get("architectures") or ()
    if listed is not None and listed.isdisjoint(named):
        return False
    return not _has_v1_feature(config.actor_rollout_ref.rollout, V1_OPTIONS_0_30 if listed is None else V1_OPTIONS_0_24)


def _has_v1_feature(rollout: DictConfig, of_version: dict[str, tuple]) -> bool:
    """Return whether an engine has a logits processor or an option, of all versions' or of this one's, for which vLLM
    does not use its V2 runner."""
    own = OmegaConf.select(rollout, "engine_kwargs.vllm") or OmegaConf.create()
    keys = {"logprobs_mode": rollout.get("logprobs_mode")}
    keys["enable_return_routed_experts"] = rollout.get("enable_rollout_routing_replay")
    named = own.get("logits_processors") or entry_points(group="vllm.logits_processors")
    options = OmegaConf.merge(keys, own)
    return bool(named) or any(OmegaConf.select(options, key) in of for key, of in (V1_OPTIONS | of_version).items())


def choose_sampler(config: DictConfig, model: dict | None) -> None:
    """Record the model runner of a run that samples at an adaptive temperature, and name the logits processor in the
    engine's config if it is V1.

    `model` is the content of the model's config.json; None if that is not on this machine.
    """
    if not config.actor_rollout_ref.rollout.get("adaptive_temperature"):
        return
    v2 = takes_v2_runner(config, model)
    OmegaConf.update(config, RUNNER, "V2" if v2 else "V1", force_add=True)
    processors = list(OmegaConf.select(config, PROCESSORS) or [])
    if not v2 and PROCESSOR not in processors:
        OmegaConf.update(config, PROCESSORS, [*processors, PROCESSOR], force_add=True)


def choose_seeds(config: DictConfig, model: dict | None) -> None:
    """Set `rollout.custom.request_seeds` (whether each request to vLLM has its own seed) unless the user has set it.

    It is set to true on CPUs, with `rollout.full_determinism`, and on vLLM's V2 runner, where seeds cost nothing. It is
    false on the V1 runner, which launches one kernel per seeded request and step, up to 512. Seeds make a run on CPUs
    reproducible, but not one on GPUs, where a request's logits depend on its batch. Call `choose_sampler` first.
    """
    if OmegaConf.select(config, SEEDS) is None:
        seeds = config.trainer.device != "cuda" or bool(config.actor_rollout_ref.rollout.get("full_determinism"))
        OmegaConf.update(config, SEEDS, seeds or takes_v2_runner(config, model), force_add=True)


def bound_scores(config: DictConfig, model: dict | None) -> None:
    """Let the V1 runner score at most `MAX_SCORED_TOKENS` tokens of a request at once, unless the user has set vLLM's
    `long_prefill_token_threshold`; the V2 runner has a bound of its own."""
    key = f"{ENGINE}.long_prefill_token_threshold"
    if needs_answers(config) and OmegaConf.select(config, key) is None and not takes_v2_runner(config, model):
        most = min(MAX_SCORED_TOKENS, config.actor_rollout_ref.rollout.max_model_len)
        OmegaConf.update(config, key, most, force_add=True)


def describe_sampler(config: DictConfig) -> str:
    """Return a phrase for the user: the temperature of training rollouts, and whether each request has its own seed.

    For an adaptive temperature it also names vLLM's runner. Call `choose_sampler` and `choose_seeds` first.
    """
    rollout = config.actor_rollout_ref.rollout
    seeds = ", a seed for each request" if OmegaConf.select(config, SEEDS) else ", no seeds"
    if not rollout.get("adaptive_temperature"):
        return f"temperature {rollout.temperature}{seeds}"
    runner = OmegaConf.select(config, RUNNER)
    way = f"{runner} runner, by {'its sampler' if runner == 'V2' else 'a logits processor'}"
    return f"adaptive temperature (tau {rollout.temperature_tau}) on vLLM's {way}{seeds}"
