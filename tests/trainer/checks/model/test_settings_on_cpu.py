"""Settings that upstream accepts and that fail later, or silently: refused with the keys named."""

import json

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from verl.trainer.checks.model.settings import (
    CPU_HEAD_SIZES,
    check_attention,
    check_context,
    check_cpu_attention,
    check_fused_kernels,
    fill_max_model_len,
    model_json,
)


def run_config(**changes):
    """4,096 + 8,192 tokens on one of upstream's FSDP2 workers; `changes` are dotted keys below actor_rollout_ref."""
    parallel = {"ulysses_sequence_parallel_size": 1}
    sizes = parallel | {"fsdp_config": parallel}
    rollout = {"name": "vllm", "mode": "async", "tree": "plain", "environment": "chat"}
    rollout |= {"prompt_length": 4096, "response_length": 8192, "max_model_len": None, "engine_kwargs": {"vllm": {}}}
    sections = {
        "model": {"path": "some/model", "override_config": {}, "use_fused_kernels": False},
        "actor": {"strategy": "fsdp2", **sizes},
        "ref": sizes,
        "rollout": rollout,
    }
    config = OmegaConf.create({"actor_rollout_ref": sections, "trainer": {"device": "cuda"}})
    for key, value in changes.items():
        OmegaConf.update(config, f"actor_rollout_ref.{key}", value, force_add=True)
    return config


def test_the_server_holds_a_prompt_and_a_response():
    """A turn that drops contexts need not read the whole response."""
    for given, thinking, expected in ((None, None, 12288), (16384, None, 16384), (4096, "dropped", 4096)):
        config = run_config(**{"rollout.max_model_len": given})
        config.environment = {"thinking": thinking} if thinking else {}
        fill_max_model_len(config)
        assert config.actor_rollout_ref.rollout.max_model_len == expected


def test_a_model_with_too_few_positions_is_refused_on_the_side_that_lacks_them():
    """Qwen2.5-Math-7B has 4,096; both trainer and server must be told of more."""
    trainer, server = "model.override_config", "rollout.engine_kwargs.vllm.hf_overrides"
    more = {f"{side}.max_position_embeddings": 32768 for side in (trainer, server)}
    needed = {"rollout.max_model_len": 12288}
    for changes, missing in (({}, trainer), (dict([list(more.items())[0]]), server)):
        with pytest.raises(ValueError, match=f"has 4096 positions in actor_rollout_ref.{missing}, .*12288 tokens"):
            check_context(run_config(**needed, **changes), {"max_position_embeddings": 4096})
    check_context(run_config(**needed, **more), {"max_position_embeddings": 4096})
    for model in ({"max_position_embeddings": 12288}, None):
        check_context(run_config(**needed), model)


def test_a_gpu_run_needs_the_package_flash_attn():
    """The package is not installed here. A login node without a GPU says nothing about the workers' packages."""
    with pytest.raises(ValueError, match="flash-attn is not installed"):
        check_attention(run_config(), cuda_is_here=True)
    config = run_config()
    config.trainer.device = "cpu"
    check_attention(config, cuda_is_here=True)


def test_fused_kernels_need_tied_embeddings_under_fsdp2():
    fused = {"model.use_fused_kernels": True}
    for model in ({"tie_word_embeddings": False}, {}, None):
        with pytest.raises(ValueError, match="use_fused_kernels=true with actor_rollout_ref.actor.strategy=fsdp2"):
            check_fused_kernels(run_config(**fused), model)
        check_fused_kernels(run_config(**fused, **{"actor.strategy": "fsdp"}), model)
        check_fused_kernels(run_config(), model)
    check_fused_kernels(run_config(**fused), {"tie_word_embeddings": True})


def test_a_head_size_without_a_kernel_on_cpus_is_refused():
    config = composed("explore", "hardware=cpu")
    for model in ({"num_attention_heads": 2, "hidden_size": 96}, {"num_attention_heads": 2, "head_dim": 40}):
        with pytest.raises(ValueError, match="its attention has the head size 4[08], and .* takes 32, 64, 80, "):
            check_cpu_attention(config, model)
        check_cpu_attention(run_config(), model)
        check_cpu_attention(config, model | {"kv_lora_rank": 512})
    for model in ({"num_attention_heads": 2, "hidden_size": 128}, {}, None):
        check_cpu_attention(config, model)


@pytest.mark.slow
def test_head_sizes_with_a_kernel_are_those_of_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()


def test_a_models_config_is_read_where_it_is_known(tmp_path, monkeypatch):
    nested = {"model_type": "qwen2_5_vl", "text_config": {"max_position_embeddings": 7}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert model_json(str(tmp_path))["max_position_embeddings"] == 7
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_json("no-such-org/no-such-model") is None
    assert model_json("/no/such/folder/at/all") is None
