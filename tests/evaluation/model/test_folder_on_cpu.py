"""Shards that upstream's FSDP workers wrote become a folder with the trained model, which other readers can read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from tests.evaluation.model.shard_writer import CASES, STEP, trained_model
from verl.evaluation.model.checkpoint import Checkpoint, checkpoint_step, write_model_folder
from verl.trainer.checkpoint_marker import CONFIG_FILE

ROOT = Path(__file__).resolve().parents[3]
IDS = torch.arange(40).view(2, 20) * 5
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with two models, one of which has a tied head, and the sharded checkpoints of the tied one."""
    folder = tmp_path_factory.mktemp("shards")
    write_tiny_model(folder / "model", TinyModelConfig(num_kv_heads=1, num_layers=2))
    # A base of the rotary positions that is no default, so that a reader that ignores it is seen.
    config = json.loads((folder / "model/config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 250.0
    (folder / "model/config.json").write_text(json.dumps(config))
    command = [sys.executable, "tests/evaluation/model/shard_writer.py", str(folder / "model"), str(folder / "runs")]
    env = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def actor_of(inputs: Path, case: str) -> Path:
    return inputs / "runs" / case / f"global_step_{STEP}" / "actor"


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("case", CASES)
def test_the_folder_holds_the_trained_model(inputs, case, tmp_path):
    write_model_folder(actor_of(inputs, case), tmp_path)
    written = AutoModelForCausalLM.from_pretrained(tmp_path)
    dtype = getattr(torch, CASES[case].dtype)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    assert written.dtype == dtype and "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    trained = trained_model(inputs / "model", CASES[case].lora, CASES[case].use_rslora)
    start = AutoModelForCausalLM.from_pretrained(inputs / "model")
    difference = (logits(written.float()) - logits(trained)).abs().max()
    assert difference < (1e-4 if dtype == torch.float32 else 0.1)
    assert (logits(start) - logits(trained)).abs().max() > 0.3
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    tokenizer, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, inputs / "model"))
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.encode("<answer>1 + 2</answer>") == original.encode("<answer>1 + 2</answer>")
    if not CASES[case].lora and dtype == torch.float32:
        assert difference == 0
    if CASES[case].lora:
        merged, weights = trained.merge_and_unload().state_dict(), written.state_dict()
        assert merged.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-6)


def test_a_head_of_its_own_is_kept(tmp_path):
    """The weights that the trainer saved beside the tokenizer are taken, as there are no shards."""
    actor = tmp_path / "global_step_1/actor"
    write_tiny_model(actor / "huggingface", TinyModelConfig(tie_word_embeddings=False))
    write_model_folder(actor, tmp_path / "exported")
    weights = load_file(tmp_path / "exported/model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    saved = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), logits(saved))


def test_without_a_config_the_weights_keep_the_trainers_data_type(inputs, tmp_path):
    shutil.copytree(actor_of(inputs, "fsdp2_bfloat16"), tmp_path / "global_step_7/actor")
    write_model_folder(tmp_path / "global_step_7/actor", tmp_path / "merged")
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("case", "damage", "message"),
    [
        ("fsdp2", lambda actor: next(actor.glob("*_rank_1.pt")).unlink(), "missing or damaged: model_.*_rank_1.pt;"),
        ("fsdp2", lambda actor: next(actor.glob("*_rank_2.pt")).write_bytes(b"PK"), "damaged: model_.*_rank_2.pt;"),
        ("fsdp1_lora", lambda actor: (actor / "lora_train_meta.json").unlink(), "lacks lora_train_meta.json"),
        ("rslora", lambda actor: forget_scaling(actor), "not say whether the adapter outputs/start, .* has use_rslora"),
        ("lora_alone", lambda actor: (actor.parent / CONFIG_FILE).unlink(), "factors only, and no config.yaml"),
        ("fsdp2", lambda actor: change(actor, "num_hidden_layers", 3), "lack .*layers.2"),
        ("fsdp2", lambda actor: change(actor, "intermediate_size", 96), "does not fit the shards: .*size mismatch"),
        ("fsdp2", lambda actor: change(actor, "architectures", ["OwnModel"]), "has no architecture OwnModel"),
    ],
)
def test_incomplete_checkpoints_are_refused(inputs, tmp_path, case, damage, message):
    actor = tmp_path / "global_step_7/actor"
    shutil.copytree(actor_of(inputs, case).parent, actor.parent)
    damage(actor)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        write_model_folder(actor, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_7"]


def forget_scaling(actor: Path) -> None:
    """Leave the config as earlier versions wrote it."""
    model = {"path": "model", "lora_adapter_path": "outputs/start", "lora": {}}
    (actor.parent / CONFIG_FILE).write_text(json.dumps({"actor_rollout_ref": {"model": model}}))


def change(actor: Path, key: str, value) -> None:
    file = actor / "huggingface/config.json"
    config = json.loads(file.read_text()) | {key: value, "layer_types": None}
    file.write_text(json.dumps(config))


def test_vllm_reads_the_config(inputs, tmp_path):
    from vllm.config import ModelConfig

    write_model_folder(actor_of(inputs, "hsdp_lora"), tmp_path)
    config = ModelConfig(model=str(tmp_path), dtype="auto")
    assert config.architectures == ["Qwen2ForCausalLM"]
    assert config.hf_config.rope_parameters["rope_theta"] == 250.0


def test_a_lora_checkpoint_is_evaluated_merged(inputs, monkeypatch, tmp_path):
    from verl.evaluation.model.checkpoint import find_checkpoint

    run = tmp_path / "outputs/run"
    shutil.copytree(actor_of(inputs, "fsdp1_lora").parents[1], run)
    # upstream's hf_model has PEFT's names, which no server loads
    (run / f"global_step_{STEP}/actor/huggingface/model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/run") / f"global_step_{STEP}"
    assert find_checkpoint("run", None) == Checkpoint(str(folder / "merged"), STEP, folder / "actor")
    write_model_folder(folder / "actor", folder / "merged")
    assert find_checkpoint("run", None) == Checkpoint(str(folder / "merged"), STEP)
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 3; it has \[7\]"):
        checkpoint_step(Path("outputs/run"), 3)
