"""A model's parameters, counted from its config, against published numbers and a real model's tensors."""

import pytest
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.configs import composed
from tests.trainer.checks.model.models import PUBLISHED, TINY, decoder, model
from verl.trainer.checks.resources.parameters import count_parameters, load_hf_config, lora_parameters

MODEL = "actor_rollout_ref.model"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_sizes(name):
    assert count_parameters(model(name)) == pytest.approx(PUBLISHED[name][0], rel=0.005)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_parameters_count_once(tied):
    hf_config = decoder(*TINY, tied)
    assert count_parameters(hf_config) == sum(
        p.numel() for p in AutoModelForCausalLM.from_config(hf_config).parameters()
    )


@pytest.mark.parametrize("modules", ["all-linear", "[q_proj,down_proj]"])
def test_lora_trains_its_factors(modules):
    hf_config = decoder(*TINY)
    names = modules if modules == "all-linear" else modules[1:-1].split(",")
    base = AutoModelForCausalLM.from_config(hf_config)
    trained = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=names))
    config = composed("grpo_trainer", "hardware=gpu", f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules={modules}")
    factors = sum(p.numel() for p in trained.parameters() if p.requires_grad)
    assert lora_parameters(hf_config, config.actor_rollout_ref.model) == factors > 0


def test_overrides_change_the_config_that_is_read(tmp_path):
    decoder(*TINY).save_pretrained(tmp_path)
    overrides = f"{MODEL}.path={tmp_path}", f"+{MODEL}.override_config.num_hidden_layers=30"
    config = composed("grpo_trainer", "hardware=gpu", *overrides)
    assert load_hf_config(config.actor_rollout_ref.model).num_hidden_layers == 30
    OmegaConf.update(config, f"{MODEL}.path", "nobody/has-this-model")
    with pytest.raises(FileNotFoundError, match="nobody/has-this-model"):
        load_hf_config(config.actor_rollout_ref.model)
