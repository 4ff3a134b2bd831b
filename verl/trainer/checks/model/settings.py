"""Checks of model and engine settings before Ray starts; each raises a ValueError that names the setting.

Upstream (verl 0.9.1) accepts the wrong settings, and a worker then fails or silently trains something else.
"""

import importlib.util
import json
import os
from itertools import product
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.workers.config.prefix_tree import check_model_config, check_section

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# the head sizes that attention on CPU has in vLLM 0.24 and 0.30
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
POSITIONS = "max_position_embeddings"
HF_OVERRIDES = "engine_kwargs.vllm.hf_overrides"


def config_folder(path: str, file: str = "config.json") -> Path | None:
    """Return the folder with a model's config `file`, local or in the hub's cache; None if this machine has neither."""
    folder = Path(os.path.expanduser(path))
    if (folder / file).exists():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, file)
    except HFValidationError:  # a path, not a hub name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def model_json(path: str) -> dict | None:
    """Return the content of the model's config.json; None if it is not on this machine. For a model that reads more
    than text, the keys of its language model take precedence, except `architectures`."""
    if (folder := config_folder(path)) is None:
        return None
    config = json.loads((folder / "config.json").read_text())
    return config | config.get("text_config", {}) | {"architectures": config.get("architectures")}


def fill_max_model_len(config: DictConfig) -> None:
    """Set `max_model_len` to the length of a prompt and a response if it is null, and refuse a shorter one. For
    upstream null means the length in the model's config, at which the server cuts every response without a message."""
    from verl.workers.rollout.run_environment import changes_contexts  # imports upstream's agent loop

    rollout = config.actor_rollout_ref.rollout
    needed = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is None:
        rollout.max_model_len = needed
    if rollout.max_model_len < needed and not changes_contexts(config):
        raise ValueError(
            f"{ROLLOUT}.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length={needed}: the server would cut responses without a word; raise it, or null"
        )


def check_context(config: DictConfig, model: dict | None) -> None:
    """Check that the model has a position for every token, in the trainer (`override_config`) and in vLLM
    (`hf_overrides`)."""
    rollout = config.actor_rollout_ref.rollout
    own = (model or {}).get(POSITIONS)
    sides = {
        f"{MODEL}.override_config": config.actor_rollout_ref.model.override_config.get(POSITIONS, own),
        f"{ROLLOUT}.{HF_OVERRIDES}": OmegaConf.select(rollout, f"{HF_OVERRIDES}.{POSITIONS}", default=own),
    }
    for key, positions in sides.items():
        if positions is not None and positions < rollout.max_model_len:
            raise ValueError(
                f"{config.actor_rollout_ref.model.path} has {positions} positions in {key}, and prompt and response "
                f"may have {rollout.max_model_len} tokens: lower data.max_response_length, or raise {POSITIONS} in "
                f"both +{MODEL}.override_config and +{ROLLOUT}.{HF_OVERRIDES} (scripts: MAX_POSITION_EMBEDDINGS=...)"
            )


def check_attention(config: DictConfig, cuda_is_here: bool) -> None:
    """Check that the model's attention works with sequence parallelism, and that flash-attn is installed for GPUs, if
    this machine has one, and therefore the same packages as the workers."""
    attention = config.actor_rollout_ref.model.override_config.get("attn_implementation", "flash_attention_2")
    for role, section in product(("actor", "ref"), ("", ".fsdp_config")):
        key = f"actor_rollout_ref.{role}{section}.ulysses_sequence_parallel_size"
        size = OmegaConf.select(config, key)
        if size > 1 and not attention.startswith("flash_attention"):
            raise ValueError(
                f"{key}={size} with {MODEL}.override_config.attn_implementation={attention}: each worker would attend "
                "to its own part of a sequence, without any error; use flash_attention_2, or a size of 1"
            )
    if config.trainer.device == "cuda" and cuda_is_here and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "trainer.device=cuda, and the package flash-attn is not installed, without which upstream is slow and its "
            "default attn_implementation does not load: see README.md (On GPUs)"
        )


def check_prefix_tree(config: DictConfig, model: dict | None) -> None:
    """Check that a run with `use_prefix_tree` has a model and settings that can be trained on a prefix tree."""
    for name in ("actor", "ref"):
        section = config.actor_rollout_ref[name]
        if not section.get("use_prefix_tree"):
            continue
        try:
            check_section(section)
        except ValueError as error:
            raise ValueError(f"actor_rollout_ref.{name}.{error}") from error
        loss = OmegaConf.select(config, "distillation.distillation_loss.loss_mode", default="")
        if OmegaConf.select(config, "distillation.enabled") and "topk" in loss:
            raise ValueError(
                f"use_prefix_tree=true with distillation.distillation_loss.loss_mode={loss}: not supported"
            )
        if model is not None:
            check_model_config(model | OmegaConf.to_container(config.actor_rollout_ref.model.override_config))


def check_cpu_attention(config: DictConfig, model: dict | None) -> None:
    """Check that vLLM's CPU build has a kernel for the model's head size; it starts without, and dies at the first
    request. Latent attention (MLA) has sizes of its own."""
    heads = (model or {}).get("num_attention_heads")
    if config.trainer.device != "cpu" or not heads or "kv_lora_rank" in model:
        return
    if (size := model.get("head_dim") or model.get("hidden_size", 0) // heads) not in CPU_HEAD_SIZES:
        raise ValueError(
            f"{MODEL}.path={config.actor_rollout_ref.model.path}: its attention has the head size {size}, and vLLM's "
            f"CPU build takes {', '.join(map(str, CPU_HEAD_SIZES))}; choose another model, or hardware=gpu"
        )


def check_cpu_strategy(config: DictConfig) -> None:
    """Check that a run on CPUs uses neither FSDP1 nor a critic, whose set-up in upstream (verl 0.9.1) needs a GPU."""
    from verl.trainer.ppo.utils import need_critic

    strategy = config.actor_rollout_ref.actor.strategy
    if config.trainer.device != "cpu":
        return
    if strategy == "fsdp":
        raise ValueError(
            f"actor_rollout_ref.actor.strategy={strategy} needs GPUs: set actor_rollout_ref.actor.strategy=fsdp2"
        )
    if need_critic(config):
        raise ValueError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator}, critic.enable={config.critic.enable}: upstream "
            "loads a critic with flash_attention_2 only, which needs GPUs: choose another estimator, or hardware=gpu"
        )


def check_fused_kernels(config: DictConfig, model: dict | None) -> None:
    """Check that a run with FSDP2 uses fused kernels only if the model's head is known to be tied to the embeddings.
    The kernels read the head's weight, and FSDP2 shards an untied head. Other strategies are not checked."""
    fsdp2 = config.actor_rollout_ref.actor.strategy == "fsdp2"
    tied = (model or {}).get("tie_word_embeddings", False)
    if config.actor_rollout_ref.model.use_fused_kernels and fsdp2 and not tied:
        raise ValueError(
            f"{MODEL}.use_fused_kernels=true with actor_rollout_ref.actor.strategy=fsdp2: the kernels read lm_head's "
            "weight, which FSDP2 keeps sharded unless it is tied to the embeddings; set it to false"
        )
