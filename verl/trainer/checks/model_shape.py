"""Reads a language model's shape, on which its memory depends: numbers of parameters and widths, without weights."""

import math
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf

from verl.trainer.checks.model import config_folder


@dataclass(frozen=True)
class ModelShape:
    """A decoder's numbers of parameters and widths."""

    parameters: int  # of the whole model, where tied parameters count once
    layer_parameters: int
    embedding_parameters: int
    tied: bool
    layers: int
    hidden: int
    intermediate: int
    query: int  # number of heads times their dimension
    kv_heads: int
    head_dim: int
    vocabulary: int

    def layer_bytes_per_token(self) -> int:
        """An estimate of the bytes that a dense layer needs for each token to be computed again with its gradients.

        The factors were measured on Qwen2, Qwen3 and Llama layers in bf16, with attention that stores no score matrix.
        """
        return 12 * self.intermediate + 18 * self.hidden + 10 * (self.query + self.kv_heads * self.head_dim)

    def kv_bytes_per_token(self, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes of a token's bf16 keys and values on a GPU; with more GPUs than KV heads, GPUs hold copies of heads."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return math.ceil(self.layers / pipeline_parallel) * heads * self.head_dim * 2 * 2


def load_hf_config(model: DictConfig):
    """The `PretrainedConfig` of `actor_rollout_ref.model` with the run's overrides, from a folder or the hub's cache.

    Raises:
        FileNotFoundError: it is not on this machine. Nothing is downloaded.
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


def model_shape(hf_config) -> ModelShape:
    """Build a causal language model on torch's device `meta`, where it takes no memory, and count its parameters."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    text = hf_config.get_text_config()
    layer = next(module for module in model.modules() if type(module).__name__ in model._no_split_modules)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        parameters=model.num_parameters(),
        layer_parameters=sum(parameter.numel() for parameter in layer.parameters()),
        embedding_parameters=model.get_input_embeddings().weight.numel(),
        tied=bool(hf_config.tie_word_embeddings),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        query=heads * head_dim,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocabulary=text.vocab_size,
    )
