"""Shards that upstream's FSDP workers wrote become a folder with the trained model, which other readers can read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from tests.configs import composed
from tests.evaluation.model.shard_writer import CASES, STEP, trained_model
from tests.packages import unpacked
from verl.evaluation.model.checkpoint import (
    Checkpoint,
    checkpoint_step,
    merge_shards,
    write_adapter,
    write_model_folder,
)
from verl.trainer.checkpoint_marker import CONFIG_FILE
from verl.trainer.checks.model.lora import check_lora
from verl.trainer.checks.settle import settle

ROOT = Path(__file__).resolve().parents[3]
IDS = torch.arange(40).view(2, 20) * 5
# The last transformers before 5, which llama.cpp's converter asks for, and the hub library that it asks for.
OLDER = ("transformers==4.57.6", "huggingface_hub==0.36.2")
GGUF = "gguf==0.19.0"
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


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.lora])
def test_the_adapter_alone_is_the_trained_model_for_peft_vllm_and_another_run(inputs, case, tmp_path):
    assert write_adapter(actor_of(inputs, case), tmp_path) == torch.float32
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    trained = trained_model(inputs / "model", True, CASES[case].use_rslora)
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path)), logits(trained))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(inputs / "model")
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1

    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    helper = PEFTHelper.from_local_dir(str(tmp_path), max_position_embeddings=None)
    served = LoRAModel.from_local_checkpoint(str(tmp_path), names, helper, lora_model_id=1, device="cpu")
    assert helper.vllm_lora_scaling_factor == (3.0 if CASES[case].use_rslora else 1.5)
    factors = {name: value for name, value in trained.named_parameters() if "lora_B" in name}
    assert len(served.loras) == len(factors) == 14
    for name, lora in served.loras.items():
        torch.testing.assert_close(lora.lora_b.float(), factors[f"base_model.model.{name}.lora_B.default.weight"])

    model, path = (
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        f"actor_rollout_ref.model.lora_adapter_path={tmp_path}",
    )
    config = composed("explore", "hardware=cpu", model, path, "actor_rollout_ref.model.lora_rank=4")
    settle(config)
    check_lora(config)
    taken = config.actor_rollout_ref.model
    assert (taken.lora_alpha, taken.lora.use_rslora) == (6, CASES[case].use_rslora)
    assert {name.split(".")[-1] for name in served.loras} == {name.split(".")[-1] for name in taken.target_modules}


def test_a_head_of_its_own_is_kept(tmp_path):
    """The weights that the trainer saved beside the tokenizer are taken, as there are no shards."""
    actor = tmp_path / "global_step_1/actor"
    write_tiny_model(actor / "huggingface", TinyModelConfig(tie_word_embeddings=False))
    (tmp_path / "exported").mkdir()
    write_model_folder(actor, tmp_path / "exported")
    weights = load_file(tmp_path / "exported/model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    saved = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), logits(saved))


def test_without_a_config_the_weights_keep_the_trainers_data_type(inputs, tmp_path):
    shutil.copytree(actor_of(inputs, "fsdp2_bfloat16"), tmp_path / "global_step_7/actor")
    merge_shards(tmp_path / "global_step_7/actor", tmp_path / "merged")
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
    with pytest.raises(SystemExit, match=f"(?s)error: .*{message}"):
        merge_shards(actor, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_7"]


def forget_scaling(actor: Path) -> None:
    """Leave the config as earlier versions wrote it."""
    model = {"path": "model", "lora_adapter_path": "outputs/start", "lora": {}}
    (actor.parent / CONFIG_FILE).write_text(json.dumps({"actor_rollout_ref": {"model": model}}))


def change(actor: Path, key: str, value) -> None:
    file = actor / "huggingface/config.json"
    config = json.loads(file.read_text()) | {key: value, "layer_types": None}
    file.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def exported(inputs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    write_model_folder(actor_of(inputs, "hsdp_lora"), folder)
    return folder


READ = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
ids = tokenizer.apply_chat_template([{"role": "user", "content": "1 2"}], add_generation_prompt=True)
torch.save([transformers.__version__, model(torch.load(sys.argv[2])).logits.detach(), ids], sys.argv[3])
"""


def test_transformers_4_reads_the_same_model(exported, tmp_path):
    """llama.cpp's converter loads config and tokenizer by it."""
    path = [str(unpacked(package, metadata=True)) for package in OLDER]
    torch.save(IDS, tmp_path / "ids.pt")
    command = [sys.executable, "-c", READ, str(exported), str(tmp_path / "ids.pt"), str(tmp_path / "out.pt")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    version, older_logits, older_ids = torch.load(tmp_path / "out.pt")
    assert version == OLDER[0].partition("==")[2]
    torch.testing.assert_close(older_logits, logits(AutoModelForCausalLM.from_pretrained(exported)))
    message = [{"role": "user", "content": "1 2"}]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert older_ids == tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


def test_llama_cpp_knows_every_weight(exported, monkeypatch):
    """The converter maps names by this table of its package; the list of architectures is in the script itself."""
    monkeypatch.syspath_prepend(unpacked(GGUF))
    import gguf

    config = json.loads((exported / "config.json").read_text())
    assert (config["architectures"], config["rope_theta"]) == (["Qwen2ForCausalLM"], 250.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    weights = load_file(exported / "model.safetensors")
    assert [name for name in weights if names.get_name(name, try_suffixes=(".weight", ".bias")) is None] == []
    assert len(weights) == 2 * 12 + 2


def test_vllm_reads_the_config(exported):
    from vllm.config import ModelConfig

    config = ModelConfig(model=str(exported), dtype="auto")
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
    merge_shards(folder / "actor", folder / "merged")
    assert find_checkpoint("run", None) == Checkpoint(str(folder / "merged"), STEP)
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 3; it has \[7\]"):
        checkpoint_step(Path("outputs/run"), 3)
