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
from verl.workers.rollout.answer_likelihood import MAX_SCORED_TOKENS
from vllm_patches.tempered_requests import PROCESSOR

ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
PROCESSORS = f"{ENGINE}.logits_processors"
SEEDS = f"{ROLLOUT}.custom.request_seeds"
RUNNER = f"{ROLLOUT}.custom.vllm_runner"
FORCED = "VLLM_USE_V2_MODEL_RUNNER"
# Options with values for which vLLM does not use its V2 runner: for any version, for 0.24 and for 0.30.
DRAFTS = ("ngram", "ngram_gpu", "draft_model", "suffix", "medusa", "mlp_speculator")
V1_OPTIONS = {"compilation_config.mode": (1,), "enable_elastic_ep": (True,), "speculative_config.method": DRAFTS}
V1_FLAGS_0_24 = ("enable_dbo", "enable_prompt_embeds", "enable_return_routed_experts", "kv_sharing_fast_prefill")
V1_OPTIONS_0_24 = dict.fromkeys(V1_FLAGS_0_24, (True,)) | {"logprobs_mode": ("raw_logits", "processed_logits")}
V1_OPTIONS_0_30 = {"mamba_cache_mode": ("all",)}
# name in vLLM 0.24's config/vllm.py; 0.30 uses the V2 runner for every architecture and has no such name
LISTED = "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"


def listed_architectures(vllm: Path) -> frozenset[str] | None:
    """Return the architectures for which the vLLM in a folder uses its V2 runner; None if it does so for all. They are
    read from vLLM's source, because importing vLLM would take the driver seconds."""
    for node in ast.parse((vllm / "config/vllm.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == LISTED:
            return frozenset(ast.literal_eval(ast.unparse(node.value).removeprefix("frozenset")))
    return None


def installed_vllm() -> Path | None:
    """Return the folder of the installed vLLM, without importing it; None if there is none."""
    package = importlib.util.find_spec("vllm")
    return Path(package.submodule_search_locations[0]) if package and package.submodule_search_locations else None


def takes_v2_runner(config: DictConfig, model: dict | None) -> bool | None:
    """Return whether the installed vLLM uses its V2 runner for the run's engines, False on CPUs and without vLLM; None
    if that depends on the model's architectures, and `model`, the content of its config.json, is None. The V2 runner
    needs Triton, which a machine without a GPU may lack although the workers have it."""
    if config.trainer.device != "cuda":
        return False
    if (forced := os.environ.get(FORCED)) is not None:
        return forced != "0"
    if (vllm := installed_vllm()) is None or (torch.cuda.is_available() and not importlib.util.find_spec("triton")):
        return False
    listed, rollout = listed_architectures(vllm), config.actor_rollout_ref.rollout
    own = {"logprobs_mode": rollout.get("logprobs_mode")}
    own["enable_return_routed_experts"] = rollout.get("enable_rollout_routing_replay")
    options = OmegaConf.merge(own, OmegaConf.select(config, ENGINE) or {})
    refused = V1_OPTIONS | (V1_OPTIONS_0_30 if listed is None else V1_OPTIONS_0_24)
    processors = options.get("logits_processors") or entry_points(group="vllm.logits_processors")
    if processors or any(OmegaConf.select(options, key) in values for key, values in refused.items()):
        return False
    named = OmegaConf.select(options, "hf_overrides.architectures") or (model or {}).get("architectures")
    return listed is None or (None if named is None else not listed.isdisjoint(named))


def choose_sampler(config: DictConfig, model: dict | None) -> None:
    """Record the runner of a run that samples at an adaptive temperature; for V1, name the logits processor."""
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
        OmegaConf.update(config, SEEDS, seeds or bool(takes_v2_runner(config, model)), force_add=True)


def bound_scores(config: DictConfig, model: dict | None) -> None:
    """Let the V1 runner score at most `MAX_SCORED_TOKENS` tokens of a request at once, unless the user has set vLLM's
    `long_prefill_token_threshold`; the V2 runner has a bound of its own."""
    key = f"{ENGINE}.long_prefill_token_threshold"
    if needs_answers(config) and OmegaConf.select(config, key) is None and not takes_v2_runner(config, model):
        most = min(MAX_SCORED_TOKENS, config.actor_rollout_ref.rollout.max_model_len)
        OmegaConf.update(config, key, most, force_add=True)


def describe_sampler(config: DictConfig) -> str:
    """Return a phrase for the user: the temperature of training rollouts, and whether each request has its own seed."""
    rollout = config.actor_rollout_ref.rollout
    seeds = ", a seed for each request" if OmegaConf.select(config, SEEDS) else ", no seeds"
    if not rollout.get("adaptive_temperature"):
        return f"temperature {rollout.temperature}{seeds}"
    runner = OmegaConf.select(config, RUNNER)
    way = f"{runner} runner, by {'its sampler' if runner == 'V2' else 'a logits processor'}"
    return f"adaptive temperature (tau {rollout.temperature_tau}) on vLLM's {way}{seeds}"
