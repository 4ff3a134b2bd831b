"""Checks that vLLM's CPU build can compute the attention of the run's model; on GPUs nothing is checked.

The build (0.30) starts with any model. If it lacks a kernel for the model's head size, its engine dies at the first
request instead.
"""

import torch
from omegaconf import DictConfig

from verl.trainer.checks.model.shape import load_hf_config
from verl.workers.config.keys import ROLLOUT

# Head sizes about which vLLM is not asked, because its import takes the driver seconds.
COMMON_HEAD_SIZES = (32, 64, 128)
# Keys of models with latent (MLA) or sparse attention.
LATENT, SPARSE = "kv_lora_rank", "index_topk"


def check_cpu_attention(config: DictConfig) -> None:
    """Check the model's head size and kind of attention; a model that is not on this machine is not checked."""
    if config.trainer.device != "cpu":
        return
    try:
        hf_config = load_hf_config(config.actor_rollout_ref.model)
    except FileNotFoundError:
        return
    text = hf_config.get_text_config()
    is_plain = not hasattr(text, LATENT) and not hasattr(text, SPARSE)
    if is_plain and plain_head_size(text) in COMMON_HEAD_SIZES:
        return
    if refusal := vllm_refusal(hf_config, getattr(torch, config.actor_rollout_ref.rollout.dtype, torch.bfloat16)):
        raise ValueError(
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}: {refusal}, so that {ROLLOUT}.name="
            f"{config.actor_rollout_ref.rollout.name} cannot serve it on CPUs; choose another model, or hardware=gpu"
        )


def plain_head_size(text) -> int | None:
    """Return the head size of a language model without latent attention, from its config; None if it has no heads."""
    heads = getattr(text, "num_attention_heads", None)
    return getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)


def vllm_refusal(hf_config, dtype: torch.dtype) -> str | None:
    """Return why the installed CPU build of vLLM cannot compute a model's attention; None if it can.

    It asks vLLM for the model's attention backend and for the backend's head sizes. Another build is not asked.
    """
    # Importing the two convertors from their own module first ends in a circle of imports.
    from vllm.config.model import MODEL_ARCH_CONFIG_CONVERTORS, ModelArchConfigConvertorBase
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if not current_platform.is_cpu():
        return None
    text = hf_config.get_text_config()
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(hf_config.model_type, ModelArchConfigConvertorBase)(hf_config, text)
    head_size = convertor.get_head_size()
    attention = AttentionSelectorConfig(
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=None,
        block_size=None,
        use_mla=convertor.is_deepseek_mla(),
        use_sparse=hasattr(text, SPARSE),
    )
    try:
        backend = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(None, attention))
    except NotImplementedError as error:
        return f"vLLM says: {error}"
    if not head_size or backend.supports_head_size(head_size):
        return None
    sizes = ", ".join(map(str, backend.get_supported_head_sizes()))
    return f"its attention has the head size {head_size}, and vLLM's CPU build takes {sizes} ({backend.get_name()})"
