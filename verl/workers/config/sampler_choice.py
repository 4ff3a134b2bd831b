"""Chooses how vLLM samples: the temperature, requests' seeds, and how many tokens it scores at once.

The adaptive temperature is a logits processor, which the engine's config must name. vLLM 0.24 and 0.30 then use
their V1 model runner, whatever the model: their V2 runner takes no logits processors.
"""

import os

from omegaconf import DictConfig, OmegaConf

from verl.workers.config.explore import needs_answers
from verl.workers.config.keys import ROLLOUT
from verl.workers.rollout.answer_likelihood import MAX_SCORED_TOKENS
from vllm_patches.tempered_requests import PROCESSOR

ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
PROCESSORS = f"{ENGINE}.logits_processors"
SEEDS = f"{ROLLOUT}.custom.request_seeds"
FORCED = "VLLM_USE_V2_MODEL_RUNNER"


def choose_sampler(config: DictConfig) -> None:
    """Name the logits processor of a run that samples at an adaptive temperature."""
    if not config.actor_rollout_ref.rollout.get("adaptive_temperature"):
        return
    if os.environ.get(FORCED, "0") != "0":
        raise ValueError(
            f"{ROLLOUT}.adaptive_temperature needs vLLM's V1 model runner, and {FORCED}={os.environ[FORCED]} forbids "
            "it: unset that variable"
        )
    processors = list(OmegaConf.select(config, PROCESSORS) or [])
    if PROCESSOR not in processors:
        OmegaConf.update(config, PROCESSORS, [*processors, PROCESSOR], force_add=True)


def choose_seeds(config: DictConfig) -> None:
    """Set `rollout.custom.request_seeds` (whether each request to vLLM has its own seed) unless the user has set it.

    It is set to true on CPUs and with `rollout.full_determinism`. Else it is false: vLLM's V1 model runner launches one
    kernel per seeded request and step, up to 512. Seeds make a run on CPUs reproducible, but not one on GPUs, where a
    request's logits depend on its batch.
    """
    if OmegaConf.select(config, SEEDS) is None:
        seeds = config.trainer.device != "cuda" or bool(config.actor_rollout_ref.rollout.get("full_determinism"))
        OmegaConf.update(config, SEEDS, seeds, force_add=True)


def bound_scores(config: DictConfig) -> None:
    """Let vLLM score at most `MAX_SCORED_TOKENS` tokens of a request at once, unless the user has set its
    `long_prefill_token_threshold`."""
    key = f"{ENGINE}.long_prefill_token_threshold"
    if needs_answers(config) and OmegaConf.select(config, key) is None:
        most = min(MAX_SCORED_TOKENS, config.actor_rollout_ref.rollout.max_model_len)
        OmegaConf.update(config, key, most, force_add=True)


def describe_sampler(config: DictConfig) -> str:
    """Return a phrase for the user: the temperature of training rollouts, and whether each request has its own seed."""
    rollout = config.actor_rollout_ref.rollout
    seeds = ", a seed for each request" if OmegaConf.select(config, SEEDS) else ", no seeds"
    if not rollout.get("adaptive_temperature"):
        return f"temperature {rollout.temperature}{seeds}"
    return f"adaptive temperature (tau {rollout.temperature_tau}){seeds}"
