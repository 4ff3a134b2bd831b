"""Models whose attention vLLM's CPU build does not compute are refused by their head size or kind of attention."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Gemma2Config, Qwen2Config
from vllm.platforms import current_platform

from tests.configs import composed
from verl.trainer.checks.model.cpu_attention import COMMON_HEAD_SIZES, check_cpu_attention, vllm_refusal

pytestmark = pytest.mark.slow  # imports vLLM


def qwen2(head_size: int, **more) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=2 * head_size, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, **more
    )


def run_config(folder, model, hardware: str = "cpu"):
    model.save_pretrained(folder)
    return composed("grpo_trainer", f"hardware={hardware}", f"actor_rollout_ref.model.path={folder}")


@pytest.mark.parametrize("head_size", [16, 48])
def test_a_head_size_without_a_kernel_is_refused_with_those_that_have_one(tmp_path, head_size):
    with pytest.raises(ValueError, match=rf"model.path={tmp_path}: .* head size {head_size}, .* takes 32, 64, 80, "):
        check_cpu_attention(run_config(tmp_path, qwen2(head_size)))
    check_cpu_attention(run_config(tmp_path, qwen2(head_size), "gpu"))


@pytest.mark.parametrize("head_size", [*COMMON_HEAD_SIZES, 80, 256])
def test_vllm_takes_the_others_and_also_those_about_which_it_is_not_asked(tmp_path, head_size):
    assert vllm_refusal(qwen2(head_size), torch.float32) is None
    check_cpu_attention(run_config(tmp_path, qwen2(head_size)))


def test_an_explicit_head_size_and_a_sliding_window():
    assert "head size 40," in vllm_refusal(qwen2(64, head_dim=40), torch.float32)
    window = qwen2(64, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"])
    assert vllm_refusal(window, torch.float32) is None
    assert vllm_refusal(Gemma2Config(head_dim=256), torch.float32) is None


def test_latent_attention_is_left_to_vllm():
    """0.30 has kernels for the latent size of DeepSeek's models alone, 0.24 has none."""
    refusal = vllm_refusal(DeepseekV2Config(kv_lora_rank=16, qk_rope_head_dim=8), torch.float32)
    assert "head size 24, and vLLM's CPU build takes 576" in refusal or "MLA is not supported" in refusal
    sparse = DeepseekV3Config(kv_lora_rank=512, qk_rope_head_dim=64)
    sparse.index_topk = 2048
    assert "not supported on CPU" in vllm_refusal(sparse, torch.float32)


def test_another_build_of_vllm_is_not_asked(monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert vllm_refusal(qwen2(16), torch.float32) is None


def test_a_model_that_is_not_here_is_not_checked():
    check_cpu_attention(composed("grpo_trainer", "hardware=cpu", "actor_rollout_ref.model.path=no-such/model"))
