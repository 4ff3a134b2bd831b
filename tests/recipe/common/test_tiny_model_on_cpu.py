"""The tiny model: its size, its tokenizer's promises, the same weights for the same seed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.common.tiny_model import WORDS, TinyModelConfig, make_tokenizer, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_under_a_million_parameters_and_loads_as_qwen2(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert model.num_parameters() < 1_000_000


@pytest.mark.parametrize("text", ["3 5 7 = 22", "é ü 漢字 🙂", "\n\n\t", "<answer>3*5</answer>", "<think>a</think>"])
def test_any_text_survives_the_tokenizer(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_single_tokens_that_verl_and_the_task_rely_on(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("\n", *WORDS, tokenizer.eos_token):
        assert len(tokenizer(text).input_ids) == 1, text


def test_chat_template_by_hand():
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "1 2 = 3"}, {"role": "assistant", "content": "<answer>1+2</answer>"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\n1 2 = 3<|im_end|>\n<|im_start|>assistant\n<answer>1+2</answer><|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n1 2 = 3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_same_seed_same_weights(folder, tmp_path):
    def weights(path):
        return torch.cat([p.flatten() for p in AutoModelForCausalLM.from_pretrained(path).parameters()])

    assert torch.equal(weights(folder), weights(write_tiny_model(tmp_path / "again")))
    other = write_tiny_model(tmp_path / "other", TinyModelConfig(seed=1))
    assert not torch.equal(weights(folder), weights(other))


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "runs/global_step_1").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="runs holds something else than a model"):
        write_tiny_model(tmp_path / "runs")
    assert (tmp_path / "runs/global_step_1").exists()
    assert write_tiny_model(write_tiny_model(tmp_path / "model")) == tmp_path / "model"
