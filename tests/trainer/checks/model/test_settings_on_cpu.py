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
    check_cpu_strategy,
    check_fused_kernels,
    check_prefix_tree,
    fill_max_model_len,
    model_json,
)

ULYSSES = "ulysses_sequence_parallel_size"


def run_config(**changes):
    """4,096 + 8,192 tokens on one of upstream's FSDP2 workers; `changes` are dotted keys below actor_rollout_ref."""
    sizes = {ULYSSES: 1, "fsdp_config": {ULYSSES: 1}}
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
    config = run_config()
    fill_max_model_len(config)
    assert config.actor_rollout_ref.rollout.max_model_len == 12288
    config = run_config(**{"rollout.max_model_len": 16384})
    fill_max_model_len(config)
    assert config.actor_rollout_ref.rollout.max_model_len == 16384
    with pytest.raises(ValueError, match="max_model_len=4096 is less than .*=12288"):
        fill_max_model_len(run_config(**{"rollout.max_model_len": 4096}))
    config = run_config(**{"rollout.max_model_len": 4096})
    config.environment = {"thinking": "dropped"}  # a turn need not read the whole response
    fill_max_model_len(config)
    assert config.actor_rollout_ref.rollout.max_model_len == 4096


def test_a_model_with_too_few_positions_is_refused_on_the_side_that_lacks_them():
    """Qwen2.5-Math-7B has 4,096; both trainer and server must be told of more."""
    trainer, server = "model.override_config", "rollout.engine_kwargs.vllm.hf_overrides"
    more = {f"{side}.max_position_embeddings": 32768 for side in (trainer, server)}
    for changes, missing in (({}, trainer), (dict([list(more.items())[0]]), server), (more, None)):
        config = run_config(**{"rollout.max_model_len": 12288}, **changes)
        if missing is None:
            check_context(config, {"max_position_embeddings": 4096})
            check_context(config, None)
        else:
            with pytest.raises(ValueError, match=f"has 4096 positions in actor_rollout_ref.{missing}, .*12288 tokens"):
                check_context(config, {"max_position_embeddings": 4096})
    check_context(run_config(**{"rollout.max_model_len": 12288}), {"max_position_embeddings": 12288})
    check_context(run_config(**{"rollout.max_model_len": 12288}), None)


@pytest.mark.parametrize(
    "key", [f"{role}{section}.{ULYSSES}" for role in ("actor", "ref") for section in ("", ".fsdp_config")]
)
def test_sequence_parallelism_needs_flash_attention(key):
    for attention in ("sdpa", "eager", "flex_attention"):
        config = run_config(**{key: 2, "model.override_config.attn_implementation": attention})
        with pytest.raises(ValueError, match=f"actor_rollout_ref.{key}=2 with .*attn_implementation={attention}"):
            check_attention(config, cuda_is_here=False)
    check_attention(run_config(**{"model.override_config.attn_implementation": "sdpa"}), cuda_is_here=False)
    check_attention(run_config(**{key: 2}), cuda_is_here=False)


def test_a_gpu_run_needs_the_package_flash_attn():
    """It is not installed here. A machine without a GPU, such as a login node, tells nothing of the workers."""
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


def test_fsdp1_is_refused_on_cpus():
    config = run_config(**{"actor.strategy": "fsdp"})
    check_cpu_strategy(config)
    config.trainer.device = "cpu"
    with pytest.raises(ValueError, match="actor.strategy=fsdp needs GPUs, .* set .*actor.strategy=fsdp2"):
        check_cpu_strategy(config)
    check_cpu_strategy(composed("explore", "hardware=cpu"))


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


QWEN2 = {"model_type": "qwen2", "use_sliding_window": False}
PREFIX_TREE = {"actor.use_prefix_tree": True}


def test_a_prefix_tree_of_a_plain_run():
    check_prefix_tree(run_config(**PREFIX_TREE, **{"ref.use_prefix_tree": True, "ref.strategy": "fsdp2"}), QWEN2)
    check_prefix_tree(run_config(**PREFIX_TREE, **{"actor.strategy": "fsdp"}), None)
    check_prefix_tree(run_config(**{"actor.strategy": "megatron"}), {"model_type": "mistral"})


SWITCHES = ["actor.pad_to_length", "actor.fsdp_config.pad_to_length", "actor.use_fused_kernels"]
SWITCHES += ["model.use_fused_kernels", "actor.calculate_sum_pi_squared", "actor.use_prefix_grouper", "actor.shuffle"]
OTHERS = {"actor.strategy": "fsdp_turbo", f"actor.{ULYSSES}": 2, f"actor.fsdp_config.{ULYSSES}": 2}


@pytest.mark.parametrize(("key", "value"), [*OTHERS.items(), *((key, True) for key in SWITCHES)])
def test_settings_that_a_prefix_tree_does_not_go_with(key, value):
    name = key.partition(".")[2]
    with pytest.raises(ValueError, match=f"use_prefix_tree=true with .*{name}={value}".replace("=True", "=[Tt]rue")):
        check_prefix_tree(run_config(**PREFIX_TREE, **{key: value}), QWEN2)
    check_prefix_tree(run_config(**{key: value}), QWEN2)


def test_the_reference_policys_section_is_checked_too():
    changes = {"ref.use_prefix_tree": True, "ref.strategy": "fsdp2", f"ref.{ULYSSES}": 4}
    with pytest.raises(ValueError, match=f"actor_rollout_ref.ref.use_prefix_tree=true with {ULYSSES}=4"):
        check_prefix_tree(run_config(**changes), QWEN2)


@pytest.mark.parametrize(
    "model, message",
    [
        ({"model_type": "mistral"}, "a model of type mistral: expected qwen2, qwen3, llama"),
        ({"model_type": "qwen2_5_vl"}, "a model of type qwen2_5_vl"),
        (QWEN2 | {"use_sliding_window": True}, "sliding window"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        (QWEN2 | {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_models_that_a_prefix_tree_does_not_go_with(model, message):
    with pytest.raises(ValueError, match=message):
        check_prefix_tree(run_config(**PREFIX_TREE), model)


def test_a_prefix_tree_with_top_k_distillation():
    config = run_config(**PREFIX_TREE)
    for enabled, loss in ((False, "forward_kl_topk"), (True, "k3")):
        config.distillation = {"enabled": enabled, "distillation_loss": {"loss_mode": loss}}
        check_prefix_tree(config, QWEN2)
    config.distillation = {"enabled": True, "distillation_loss": {"loss_mode": "forward_kl_topk"}}
    with pytest.raises(ValueError, match="distillation.distillation_loss.loss_mode=forward_kl_topk"):
        check_prefix_tree(config, QWEN2)
