"""LoRA's keys: what follows from `lora_rank`, what a plan says about it, and what is refused with the keys named."""

import json

import pytest
from omegaconf import OmegaConf

from tests import configs
from verl.trainer.checks.model.lora import check_lora, describe_lora, settle_lora

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
    assert describe_lora(part.model) == "rank 8, alpha 16, modules all-linear; sent to vLLM as an adapter"


@pytest.mark.parametrize("run", [SEPARATE, "credit=igpo"])
def test_separate_servers_and_runs_that_score_answers_get_merged_weights(run):
    model = composed(run, f"{MODEL}.target_modules=[q_proj,v_proj]").actor_rollout_ref.model
    assert describe_lora(model) == "rank 8, alpha 16, modules q_proj, v_proj; merged into the weights that vLLM gets"


def test_a_checkpoint_holds_no_folder_that_nothing_can_load():
    assert "hf_model" in composed(rank=0).actor_rollout_ref.actor.checkpoint.save_contents
    assert composed().actor_rollout_ref.actor.checkpoint.save_contents == ["model", "optimizer", "extra"]


def test_without_a_rank_nothing_changes():
    before = configs.composed("explore", "hardware=cpu", f"{MODEL}.lora_rank=0", SEPARATE)
    assert OmegaConf.to_container(composed(SEPARATE, rank=0)) == OmegaConf.to_container(before)


def test_an_adapter_of_another_rank_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 16}))
    path = f"{MODEL}.lora_adapter_path={tmp_path}"
    with pytest.raises(ValueError, match="lora_rank=8, and the rank in .*adapter_config.json is 16: set lora_rank=16"):
        check_lora(composed(path))
    check_lora(composed(path, rank=16))
