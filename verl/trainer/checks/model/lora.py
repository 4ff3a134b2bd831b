"""Settles and checks the keys of LoRA: `actor_rollout_ref.model.lora_rank` and those that it needs (verl 0.9.1).

A rank above 0 freezes the model's weights and trains two small factors beside each linear layer. vLLM gets the factors
alone, as an adapter of the weights that it reads from the model's files. `schedule=separate_async` sends whole weights
instead, into which the trainer has merged the factors. The reference policy is the model without its adapter.
"""

import json
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.workers.config.explore import needs_answers
from verl.workers.config.schedule import ENGINE, schedule_of

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# the largest rank of vLLM 0.24 and 0.30 (`MaxLoRARanks` in vllm/config/lora.py)
HIGHEST_RANK = 512
# modules whose factors vLLM ignores without a message, for instance in Qwen2
NOT_ADAPTED = ("lm_head", "embed_tokens")


def settle_lora(config: DictConfig) -> None:
    """Set the keys that follow from `model.lora_rank` > 0.

    `load_format=dummy` becomes `auto`, so that vLLM reads the frozen weights itself. `hf_model` leaves the checkpoint's
    contents, because upstream would write a folder with the names of PEFT, which nothing can load. The
    factors are merged with `schedule=separate_async`, because upstream's engines for it would send the frozen weights
    alone, and in runs that score answers: with an adapter on Llama or Qwen3, vLLM's kernel for logits (0.24, 0.30)
    takes a row for each request of a step, and so writes out of bounds where fewer tokens are scored.
    """
    part = config.actor_rollout_ref
    if part.model.lora_rank <= 0:
        return
    with open_dict(config):
        if part.rollout.load_format == "dummy":
            part.rollout.load_format = "auto"
        checkpoint = part.actor.checkpoint
        checkpoint.save_contents = [content for content in checkpoint.save_contents if content != "hf_model"]
        if schedule_of(config) == "separate_async" or needs_answers(config):
            part.model.lora.merge = True


def describe_lora(model: DictConfig) -> str:
    """Return a sentence on the factors of a run with `model.lora_rank` > 0, and on how vLLM gets them."""
    way = "merged into the weights that vLLM gets" if model.lora.get("merge") else "sent to vLLM as an adapter"
    modules = model.target_modules if isinstance(model.target_modules, str) else ", ".join(model.target_modules)
    return f"rank {model.lora_rank}, alpha {model.lora_alpha}, modules {modules}; {way}"


def check_lora(config: DictConfig) -> None:
    """Check that trainer and server support the run's LoRA; upstream would fail late, or train something else."""
    part = config.actor_rollout_ref
    model, strategy = part.model, part.actor.strategy
    fsdp = strategy in ("fsdp", "fsdp2")
    if fsdp and (rank := OmegaConf.select(model, "lora.rank", default=0)):
        raise ValueError(
            f"{MODEL}.lora.rank={rank} is read by Megatron alone: set {MODEL}.lora_rank={rank} for strategy={strategy}"
        )
    if model.lora_adapter_path:
        _check_adapter(model)
    if not (rank := model.lora_rank):
        return
    if not 0 < rank <= HIGHEST_RANK:
        raise ValueError(f"{MODEL}.lora_rank={rank}: expected a number from 1 to {HIGHEST_RANK}, or 0 for no LoRA")
    if not fsdp:
        raise ValueError(
            f"{MODEL}.lora_rank={rank} with actor_rollout_ref.actor.strategy={strategy}: expected fsdp or fsdp2"
        )
    if parameters := model.get("target_parameters"):
        raise ValueError(
            f"{MODEL}.target_parameters={parameters}: vLLM gets adapters of linear layers alone; remove the key, so "
            "that fused experts stay frozen"
        )
    named = [model.target_modules] if isinstance(model.target_modules, str) else model.target_modules or ()
    if ignored := sorted(set(NOT_ADAPTED) & set(named)):
        raise ValueError(
            f"{MODEL}.target_modules names {', '.join(ignored)}, whose factors would be trained and never reach vLLM: "
            "name the layers' projections, or all-linear"
        )
    if (backend := OmegaConf.select(config, f"{ENGINE}.backend")) == "delta_sharded":
        raise ValueError(f"{ENGINE}.backend={backend} with {MODEL}.lora_rank={rank}: it sends no LoRA; expected nccl")


def _check_adapter(model: DictConfig) -> None:
    """Check that the rank of the adapter from which the run starts is the run's; a hub name is not looked up."""
    file, rank = Path(model.lora_adapter_path) / "adapter_config.json", model.lora_rank
    if rank <= 0:
        raise ValueError(
            f"{MODEL}.lora_adapter_path={model.lora_adapter_path} with {MODEL}.lora_rank={rank}: the adapter would not "
            "be loaded; set lora_rank to its rank"
        )
    if file.exists() and (own := json.loads(file.read_text())["r"]) != rank:
        raise ValueError(f"{MODEL}.lora_rank={rank}, and the rank in {file} is {own}: set lora_rank={own}")
