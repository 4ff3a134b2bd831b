"""Counts a model's parameters from its config, without its weights."""

import torch
from omegaconf import DictConfig, OmegaConf

from verl.trainer.checks.model.settings import config_folder


def load_hf_config(model: DictConfig):
    """Return the `PretrainedConfig` of `actor_rollout_ref.model` with the run's overrides.

    Raises:
        FileNotFoundError: the config is neither in a folder nor in the hub's cache. Nothing is downloaded.
    """
    from transformers import AutoConfig
    from verl.utils.model import update_model_config

    name = model.hf_config_path or model.path
    if (folder := config_folder(name)) is None:
        raise FileNotFoundError(f"{name}: neither a folder nor in the hub's cache")
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    overrides = OmegaConf.to_container(model.override_config, resolve=True)
    update_model_config(hf_config, overrides.get("model_config", overrides))
    return hf_config


def count_parameters(hf_config) -> int:
    """Return the number of parameters of a causal language model; tied parameters count once."""
    return _on_meta(hf_config).num_parameters()


def lora_parameters(hf_config, model: DictConfig) -> int:
    """Return the number of parameters of the LoRA factors that `actor_rollout_ref.model` asks for; 0 without LoRA."""
    if model.lora_rank <= 0:
        return 0
    from peft import LoraConfig, get_peft_model

    keys = {"target_modules": model.target_modules, "exclude_modules": model.exclude_modules}
    keys = {key: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for key, value in keys.items()}
    adapted = get_peft_model(_on_meta(hf_config), LoraConfig(task_type="CAUSAL_LM", r=model.lora_rank, **keys))
    return adapted.get_nb_trainable_parameters()[0]


def _on_meta(hf_config):
    """Return the causal language model on torch's device `meta`, where it takes no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
