"""Settles and checks the keys of LoRA: `actor_rollout_ref.model.lora_rank` and those that it needs (verl 0.9.1).

A rank above 0 freezes the model's weights and trains two small factors beside each linear layer. vLLM gets the factors
alone, as an adapter of the weights that it reads from the model's files. `schedule=separate_async` sends whole weights
instead, into which the trainer has merged the factors. The reference policy is the model without its adapter.
"""

import json
import re

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.trainer.checks.model.settings import config_folder
from verl.workers.config.explore import needs_answers
from verl.workers.config.schedule import ENGINE, schedule_of

MODEL = "actor_rollout_ref.model"
# the largest rank of vLLM 0.24 and 0.30 (`MaxLoRARanks` in vllm/config/lora.py)
HIGHEST_RANK = 512
# modules whose factors vLLM ignores without a message, for instance in Qwen2
NOT_ADAPTED = ("lm_head", "embed_tokens")
DEFAULT_ALPHA = 16  # upstream's
# Keys of an adapter's config that trainer, vLLM and merged checkpoints follow, or that say nothing about the model.
HONORED = "r lora_alpha use_rslora target_modules exclude_modules layers_to_transform layers_pattern".split()
HONORED += "lora_dropout base_model_name_or_path revision auto_mapping inference_mode peft_version".split()
# Values that switch any other key off. The factors' first values are "gaussian" or PEFT's default; PEFT's other ways to
# choose them change the frozen weights too.
NEUTRAL: tuple = (None, False, [], {}, "gaussian")


def settle_lora(config: DictConfig) -> None:
    """Set the keys that follow from `model.lora_rank` > 0.

    `load_format=dummy` becomes `auto`, so that vLLM reads the frozen weights itself. `hf_model` leaves the checkpoint's
    contents, because upstream would write a folder with PEFT's names, which nothing can load. The factors are merged
    with `schedule=separate_async`, whose engines in upstream would send the frozen weights alone, and in runs that
    score answers: with an adapter on Llama or Qwen3, vLLM's kernel for logits (0.24, 0.30) writes out of bounds where
    fewer tokens are scored than requests run. An adapter from which the run starts brings its own alpha and modules.
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
        if part.model.lora_adapter_path:
            _take_from_adapter(part.model)


def check_lora(config: DictConfig) -> None:
    """Check that trainer and server support the run's LoRA; upstream would fail late, or train something else."""
    part = config.actor_rollout_ref
    model, strategy = part.model, part.actor.strategy
    fsdp = strategy in ("fsdp", "fsdp2")
    if fsdp and (rank := OmegaConf.select(model, "lora.rank", default=0)):
        raise ValueError(
            f"{MODEL}.lora.rank={rank} is read by Megatron alone: set {MODEL}.lora_rank={rank} for strategy={strategy}"
        )
    if model.lora_adapter_path and model.lora_rank <= 0:
        raise ValueError(
            f"{MODEL}.lora_adapter_path={model.lora_adapter_path} with {MODEL}.lora_rank={model.lora_rank}: the "
            "adapter would not be loaded; set lora_rank to its rank"
        )
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
    named = model.target_modules or ()
    pattern = named if isinstance(named, str) else "|".join(re.escape(name.rpartition(".")[2]) for name in named)
    if ignored := [name for name in NOT_ADAPTED if any(map(re.compile(pattern).fullmatch, (name, f"model.{name}")))]:
        raise ValueError(
            f"{MODEL}.target_modules names {', '.join(ignored)}, whose factors would be trained and never reach vLLM: "
            "name the layers' projections, or all-linear"
        )
    if (backend := OmegaConf.select(config, f"{ENGINE}.backend")) == "delta_sharded":
        raise ValueError(f"{ENGINE}.backend={backend} with {MODEL}.lora_rank={rank}: it sends no LoRA; expected nccl")


def _take_from_adapter(model: DictConfig) -> None:
    """Give the keys of LoRA the values of the adapter from which the run starts, as upstream's trainer takes them from
    there; refuse one with a part that trainer, vLLM or a merged checkpoint would not follow."""
    from peft import LoraConfig
    from safetensors import safe_open

    path = model.lora_adapter_path
    folder = config_folder(path, "adapter_config.json")
    if folder is None or not (folder / "adapter_model.safetensors").exists():
        raise ValueError(
            f"{MODEL}.lora_adapter_path={path}: expected a folder with adapter_config.json and "
            f"adapter_model.safetensors, or a name in the hub's cache, which `hf download {path}` fills"
        )
    file, plain = folder / "adapter_config.json", LoraConfig(task_type="CAUSAL_LM").to_dict()
    own = plain | json.loads(file.read_text())
    unknown = sorted(key for key in own if key not in HONORED and own[key] not in (*NEUTRAL, plain.get(key)))
    unknown += ["lora_alpha"] if own["lora_alpha"] % 1 else []  # upstream's checkpoints hold the whole part
    if unknown:
        raise ValueError(
            f"{file} has {', '.join(f'{key}={own[key]}' for key in unknown)}: expected LoRA or rsLoRA of "
            f"linear layers, with one rank and one whole alpha; or merge it into a model, and set {MODEL}.path to that"
        )
    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        names = sorted(weights.keys())
    factors = (".lora_A.weight", ".lora_B.weight")
    if ignored := [each for each in names if not each.endswith(factors) or each.split(".")[-3] in NOT_ADAPTED]:
        raise ValueError(f"{folder} holds {', '.join(ignored[:3])}: expected factors of the layers' projections alone")
    for key, value, default in (("lora_rank", own["r"], None), ("lora_alpha", own["lora_alpha"], DEFAULT_ALPHA)):
        if model[key] not in (value, default):
            raise ValueError(f"{MODEL}.{key}={model[key]}, and that of {file} is {value}: set {key}={value}")
    modules = own["target_modules"] or {each.split(".")[-3] for each in names}
    model.target_modules = modules if isinstance(modules, str) else sorted(modules)
    model.lora_alpha, model.exclude_modules = int(own["lora_alpha"]), own["exclude_modules"]
    model.lora.use_rslora = bool(own["use_rslora"])
