"""The size of the buckets of weights: what is chosen, what is refused, and what a real model sends."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM

from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from tests.configs import composed
from verl.trainer.checks.resources import weight_bucket
from verl.trainer.checks.resources.weight_bucket import (
    KEY,
    check_shared_memory,
    check_weight_bucket,
    fill_weight_bucket,
    sent_weights,
)

# Of 266 tokens: a tied model of 30.1 MB in float32, whose largest tensor has 4 MB, and the same with a head of its own.
SIZES = {"hidden_size": 1024, "intermediate_size": 1024, "num_layers": 1, "num_heads": 16, "num_kv_heads": 16}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    return write_tiny_model(folder, TinyModelConfig(**SIZES, tie_word_embeddings=request.param)), request.param


def run_config(path, hardware: str = "cpu", bucket: int | None = None, **changes) -> DictConfig:
    config = composed("grpo_trainer", f"hardware={hardware}", f"actor_rollout_ref.model.path={path}")
    OmegaConf.update(config, KEY, bucket)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def chosen(config: DictConfig) -> int:
    fill_weight_bucket(config)
    return OmegaConf.select(config, KEY)


def test_the_sizes_are_those_of_the_models_own_state(model):
    """The trainer sends this state, in which a tied head is a tensor of its own."""
    path, tied = model
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    sizes = {name: tensor.nbytes / 2**20 for name, tensor in state.items()}
    weights = sent_weights(run_config(path))
    assert weights.total == pytest.approx(sum(sizes.values())) and weights.largest == pytest.approx(max(sizes.values()))
    assert sizes[weights.largest_name] == weights.largest and weights.tied == tied


def test_on_cpus_the_choice_is_all_weights_if_they_are_few(model):
    path, _ = model
    size = sent_weights(run_config(path)).total
    assert size <= chosen(run_config(path)) < size + 1
    half = run_config(path, actor_rollout_ref__actor__fsdp_config__model_dtype="bf16")
    assert size / 2 <= chosen(half) < size / 2 + 1


def test_on_cpus_the_choice_is_what_is_needed_if_they_are_many(model, monkeypatch):
    path, tied = model
    monkeypatch.setattr(weight_bucket, "MOST_ON_CPU", 2)
    config = run_config(path)
    weights = sent_weights(config)
    assert chosen(config) - 1 < (weights.total if tied else weights.largest) <= chosen(config)
    check_weight_bucket(config)


def test_on_gpus_the_choice_is_not_larger_than_the_weights(model):
    path, _ = model
    size = sent_weights(run_config(path)).total
    assert size <= chosen(run_config(path, "gpu")) < size + 1
    assert chosen(run_config("some/model", "gpu")) == 2048
    assert chosen(run_config(path, "gpu", 7)) == 7
    check_weight_bucket(run_config(path, "gpu", 1))  # a larger tensor is sent by itself


def test_a_bucket_that_is_too_small_is_refused_with_the_size_that_is_needed(model):
    path, tied = model
    needed = 31 if tied else 4
    with pytest.raises(ValueError, match=f"{KEY}={needed - 1} is too small for {path}: .* set at least {needed}, or"):
        check_weight_bucket(run_config(path, bucket=needed - 1))
    check_weight_bucket(run_config(path, bucket=needed))


def test_a_tied_head_that_is_saved_is_counted_once_and_one_that_nobody_mentions_is_tied(tmp_path):
    from safetensors.torch import save_file

    weight = torch.zeros(512, 1024)  # 2 MB
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    save_file({"model.embed_tokens.weight": weight, "lm_head.weight": weight.clone()}, tmp_path / "model.safetensors")
    assert sent_weights(run_config(tmp_path)).needed_on_cpu() == 4
    (tmp_path / "config.json").write_text("{}")
    save_file({"model.embed_tokens.weight": weight}, tmp_path / "model.safetensors")
    assert sent_weights(run_config(tmp_path)).needed_on_cpu() == 4


def test_a_model_without_safetensors_gets_upstreams_size(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = run_config(tmp_path)
    assert chosen(config) == 2048
    check_weight_bucket(config)


def test_shared_memory_that_is_too_small_is_refused(model, tmp_path, monkeypatch):
    path, _ = model
    config = run_config(path, bucket=2048, trainer__n_gpus_per_node=2)
    needed = 2 * sent_weights(config).total
    for free, refused in ((needed + 1, False), (needed - 1, True)):
        usage = weight_bucket.shutil._ntuple_diskusage(0, 0, int(free * 2**20))
        monkeypatch.setattr(weight_bucket.shutil, "disk_usage", lambda _, usage=usage: usage)
        if refused:
            with pytest.raises(ValueError, match="MB free, and the weights .* need 61 MB there"):
                check_shared_memory(config, str(tmp_path))
        else:
            check_shared_memory(config, str(tmp_path))
        check_shared_memory(run_config(path, "gpu", 2048, trainer__n_gpus_per_node=1), str(tmp_path))
    monkeypatch.setattr(weight_bucket.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))  # as in Docker
    with pytest.raises(ValueError, match=r"has 64 MB free, and 8 GPUs \(NCCL\) need 512 MB there: .* --shm-size=1g"):
        check_shared_memory(run_config(path, "gpu", 2048), str(tmp_path))
