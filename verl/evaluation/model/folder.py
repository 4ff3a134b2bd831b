"""Writes a checkpoint's model as a Hugging Face folder, which transformers, vLLM and llama.cpp's converter can read."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl.evaluation.model.shards import PEFT_PREFIX, Weights, lora_settings, read_factors, read_weights
from verl.trainer.checkpoint_marker import saved_config

HUGGINGFACE = "huggingface"  # the trainer's folder of config and tokenizer beside the shards
LARGEST_FILE = "5GB"


def write_model_folder(actor: Path, folder: Path) -> torch.dtype:
    """Write the model of a checkpoint, with its tokenizer, into the empty folder `folder`.

    The weights get the data type in which the run's rollout served them. If the checkpoint does not say it, they keep
    the trainer's data type, which is returned. LoRA is merged.
    """
    source, config = actor / HUGGINGFACE, saved_config(actor.parent)
    model_class = _model_class(source)
    dtype = served_dtype(config)
    if list(actor.glob("model_world_size_*.pt")):
        model = _load(model_class, source, read_weights(actor, dtype, partial(_base_weights, model_class, config)))
    else:
        model = model_class.from_pretrained(source, dtype=dtype or "auto")
    model.save_pretrained(folder, max_shard_size=LARGEST_FILE)
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json" and ".safetensors" not in file.name:
            shutil.copy(file, folder)
    for file in folder.glob("*.safetensors"):  # The library lets the owner alone read them.
        shutil.copymode(folder / "config.json", file)
    _add_older_names(folder)
    return model.dtype


def write_adapter(actor: Path, folder: Path) -> torch.dtype:
    """Write the LoRA of a checkpoint into the empty folder `folder` in PEFT's format, and return its data type."""
    from peft import LoraConfig, get_peft_model

    settings, factors, config = lora_settings(actor), read_factors(actor), saved_config(actor.parent)
    modules = {name.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for name in factors}
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=sorted(modules), **settings)
    model_class = _model_class(source := actor / HUGGINGFACE)
    with torch.device("meta"):
        adapted = get_peft_model(model_class(model_class.config_class.from_pretrained(source)), lora)
    if unknown := sorted(factors.keys() - adapted.state_dict().keys()):
        raise ValueError(f"{actor} holds {', '.join(unknown[:3])}, which are no factors of linear layers")
    lora.base_model_name_or_path = None if config is None else config.actor_rollout_ref.model.path
    adapted.save_pretrained(str(folder), state_dict=factors, save_embedding_layers=False)
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")
    return next(iter(factors.values())).dtype


def served_dtype(config: DictConfig | None) -> torch.dtype | None:
    """Return the data type in which a run's rollout served the weights; None if the run's config leaves it to vLLM."""
    name = None if config is None else OmegaConf.select(config, "actor_rollout_ref.rollout.dtype")
    return getattr(torch, str(name), None)


def _model_class(source: Path) -> Any:
    import transformers

    name = transformers.AutoConfig.from_pretrained(source).architectures[0]
    if not hasattr(transformers, name):
        raise ValueError(f"{source}/config.json: transformers {transformers.__version__} has no architecture {name}")
    return getattr(transformers, name)


def _base_weights(model_class: Any, config: DictConfig | None) -> Weights:
    if config is None:
        raise ValueError("the checkpoint holds LoRA's factors only, and no config.yaml that names the base model")
    return model_class.from_pretrained(config.actor_rollout_ref.model.path, dtype="auto").state_dict().items()


def _load(model_class: Any, source: Path, weights: Weights) -> Any:
    """Return the model whose config lies in `source`, with these weights."""
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_pretrained(source))
    try:
        unknown = model.load_state_dict(dict(weights), strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise ValueError(f"{source}/config.json does not fit the shards: {error}") from error
    model.tie_weights()  # A head that is tied to the embeddings may have no weight of its own.
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if unknown or missing:
        raise ValueError(f"{source}/config.json does not fit the shards, which lack {missing} and have {unknown}")
    return model


def _add_older_names(folder: Path) -> None:
    """Add the names that transformers 4 reads, as llama.cpp's converter does, to what transformers 5 has written.

    Without them transformers 4 takes a default base of the rotary positions, without a message, and does not know the
    tokenizer's class. transformers 5 reads both.
    """
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.get("dtype")
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    file = folder / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text())
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokenizer.get("extra_special_tokens"), list):
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    file.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False) + "\n")
