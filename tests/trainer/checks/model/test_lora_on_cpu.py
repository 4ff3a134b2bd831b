"""LoRA's keys: what follows from `lora_rank`, what a plan says about it, and what is refused with the keys named."""

import json
import re

import pytest
from omegaconf import OmegaConf
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from tests import configs
from tests.tables import table
from verl.trainer.checks.model.lora import check_lora, settle_lora
from verl.trainer.checks.resources.parameters import lora_parameters
from verl.trainer.checks.run_dir import check_same_method, prepare_run_dir

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
SEPARATE = "schedule=separate_async"


def composed(*overrides: str, rank: int = 8):
    config = configs.composed("explore", "hardware=cpu", f"{MODEL}.lora_rank={rank}", *overrides)
    OmegaConf.set_struct(config, False)
    settle_lora(config)
    return config


def test_vllm_reads_the_frozen_weights_and_gets_an_adapter():
    part = composed().actor_rollout_ref
    assert part.rollout.load_format == "auto" and not part.model.lora.merge
    assert composed("actor_rollout_ref.rollout.load_format=safetensors").actor_rollout_ref.rollout.load_format == (
        "safetensors"
    )


@pytest.mark.parametrize("run", [SEPARATE, "credit=igpo"])
def test_separate_servers_and_runs_that_score_answers_get_merged_weights(run):
    assert composed(run).actor_rollout_ref.model.lora.merge


def test_a_checkpoint_holds_no_folder_that_nothing_can_load():
    assert "hf_model" in composed(rank=0).actor_rollout_ref.actor.checkpoint.save_contents
    assert composed().actor_rollout_ref.actor.checkpoint.save_contents == ["model", "optimizer", "extra"]


def test_without_a_rank_nothing_changes():
    before = configs.composed("explore", "hardware=cpu", f"{MODEL}.lora_rank=0", SEPARATE)
    assert OmegaConf.to_container(composed(SEPARATE, rank=0)) == OmegaConf.to_container(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("base") / "model", TinyModelConfig(num_layers=2))


def start(folder, base, save=None, changes=None, **settings) -> str:
    """Return the override for a start from an adapter that PEFT writes, with keys of its config changed afterwards."""
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]} | settings
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).save_pretrained(folder, **save or {})
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (changes or {})))
    return f"{MODEL}.lora_adapter_path={folder}"


@pytest.mark.parametrize(("settings", "message"), table(__file__, "refused adapters"))
def test_an_adapter_that_would_not_be_followed_is_refused(base, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        composed(start(tmp_path, base, **settings))


def test_an_adapter_brings_its_alpha_and_modules(base, tmp_path):
    path = start(
        tmp_path, base, lora_alpha=64, use_rslora=True, exclude_modules=["layers.1.self_attn.q_proj"], lora_dropout=0.1
    )
    config = composed(path)
    check_lora(config)
    model = config.actor_rollout_ref.model
    assert (model.lora_alpha, model.lora.use_rslora, model.target_modules) == (64, True, ["q_proj", "v_proj"])
    assert model.exclude_modules == ["layers.1.self_attn.q_proj"]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path, is_trainable=True)
    size = lora_parameters(AutoConfig.from_pretrained(base), model)
    assert size == adapted.get_nb_trainable_parameters()[0] > 0
    with pytest.raises(ValueError, match="lora_alpha=32, and that of .* is 64: set lora_alpha=64"):
        composed(path, f"{MODEL}.lora_alpha=32")
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="expected a folder with adapter_config.json and adapter_model.safetensors"):
        composed(path)


@pytest.mark.parametrize(("key", "value"), table(__file__, "resumed adapters"))
def test_a_run_resumes_with_its_own_lora(base, tmp_path, key, value):
    path = start(tmp_path / "start", base)
    config = composed(path, f"trainer.default_local_dir={tmp_path}")
    prepare_run_dir(config)
    (tmp_path / "global_step_20/actor").mkdir(parents=True)
    (tmp_path / "global_step_20/COMPLETE").touch()
    check_same_method(config)
    OmegaConf.update(config, f"{MODEL}.{key}", value)
    with pytest.raises(ValueError, match=re.escape(f"holds a run with {MODEL}.{key}=")):
        check_same_method(config)
