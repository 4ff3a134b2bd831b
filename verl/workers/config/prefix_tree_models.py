"""Checks that a model of `transformers` can be computed on a prefix tree."""

from collections.abc import Mapping

MODEL_TYPES = ("qwen2", "qwen3", "llama")


def check_model_config(model: Mapping) -> None:
    """Check the content of a model's config.json.

    Raises:
        ValueError: the prefix-tree engine does not support this kind of model.
    """
    if model.get("model_type") not in MODEL_TYPES:
        raise ValueError(
            f"use_prefix_tree=true with a model of type {model.get('model_type')}: expected {', '.join(MODEL_TYPES)}"
        )
    windows = model.get("use_sliding_window") or "sliding_attention" in (model.get("layer_types") or ())
    if windows:
        raise ValueError("use_prefix_tree=true with a model whose layers have a sliding window: not supported")
    if model.get("attention_dropout"):
        raise ValueError(
            f"use_prefix_tree=true with attention_dropout={model['attention_dropout']}: set "
            "+actor_rollout_ref.model.override_config.attention_dropout=0"
        )
