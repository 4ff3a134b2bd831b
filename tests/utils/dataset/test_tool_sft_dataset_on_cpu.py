"""Tokens and masks of demonstrations against parts encoded one by one here, and against the rollout's own protocol."""

import json

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from verl.trainer.sft_trainer import create_sft_dataset

from recipe.common.tiny_model import CHAT_TEMPLATE, END_OF_TURN, PAD, make_tokenizer, write_tiny_model
from verl.utils.dataset.tool_sft_dataset import ChatEncoder, DemonstrationEncoder, default_functions, encoder_of
from verl.workers.rollout.tools.protocol import Protocol

CALL, END = "<think>t</think><search>q</search>", r"<think>t</think><answer>\boxed{1}</answer>"
MESSAGES = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "he"},
    {"role": "assistant", "content": END},
]
PROMPT = "<|im_start|>system\nUse tools.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def merging_tokenizer():
    """The tiny tokenizer, and one merge across the border of a call and its result: `> `."""
    core = json.loads(make_tokenizer().backend_tokenizer.to_str())
    core["model"]["vocab"][">Ġ"] = max(token["id"] for token in core["added_tokens"]) + 1
    core["model"]["merges"] = [[">", "Ġ"]]
    options = {"eos_token": END_OF_TURN, "pad_token": PAD, "chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core)), **options)


@pytest.fixture(params=[make_tokenizer, merging_tokenizer])
def tokenizer(request):
    return request.param()


def parts_by_hand(tokenizer) -> list[tuple[list[int], int]]:
    texts = [(PROMPT, 0), (CALL, 1), (" <result>\nhe\n</result>", 0), (END, 1), (END_OF_TURN, 1)]
    return [(tokenizer(text, add_special_tokens=False).input_ids, mask) for text, mask in texts]


def dataset_of(folder, rows: list[list[dict]], tokenizer, **options):
    path = folder / "rows.parquet"
    pd.DataFrame({"messages": rows}).to_parquet(path)
    custom = {"path": "pkg://verl.utils.dataset.tool_sft_dataset", "name": "ToolSFTDataset"}
    config = {"pad_mode": "no_padding", "max_length": 1000, "truncation": "error", "custom_cls": custom}
    return create_sft_dataset(str(path), OmegaConf.create({**config, **options}), tokenizer, None)


def test_parts_are_encoded_one_by_one(tmp_path, tokenizer):
    row = dataset_of(tmp_path, [MESSAGES], tokenizer)[0]
    parts = parts_by_hand(tokenizer)
    assert row["input_ids"].tolist() == [token for ids, _ in parts for token in ids]
    assert row["loss_mask"].tolist() == [mask for ids, mask in parts for _ in ids]
    assert row["position_ids"].tolist() == list(range(len(row["input_ids"])))
    assert all(value.dtype == torch.int64 for value in row.values())


@pytest.mark.parametrize("text", ["he", "", "a < b", "see </result><answer>1</answer>", f"{END_OF_TURN} x", "漢字 é"])
def test_results_are_the_rollouts_own(tokenizer, text):
    messages = [*MESSAGES[:3], {"role": "tool", "content": text}, MESSAGES[4]]
    ids, mask = DemonstrationEncoder(tokenizer).encode(messages)
    before, after = (len(ids) for ids in map(tokenizer.encode, (PROMPT + CALL, END + END_OF_TURN)))
    assert ids[before:-after] == Protocol(tokenizer, ("search", "python")).result_ids(text, 10_000)
    assert set(mask[before:-after]) == {0}
    assert tokenizer.decode(ids).count("</result>") == 1 and ids[before:].count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("name", ["ToolSFTDataset", "FullBatchSFTDataset"])
def test_fewer_rows_than_a_batch_are_refused(tmp_path, name):
    custom = {"path": "pkg://verl.utils.dataset.tool_sft_dataset", "name": name}
    options = {"custom_cls": custom, "train_batch_size": 3}
    assert len(dataset_of(tmp_path, [MESSAGES] * 3, make_tokenizer(), **options)) == 3
    with pytest.raises(ValueError, match="rows.parquet.* has 2 rows, expected at least data.train_batch_size=3"):
        dataset_of(tmp_path, [MESSAGES] * 2, make_tokenizer(), **options)


def test_rows_that_are_too_long_are_cut_or_named(tmp_path):
    tokenizer = make_tokenizer()
    whole = dataset_of(tmp_path, [MESSAGES], tokenizer)[0]
    cut = dataset_of(tmp_path, [MESSAGES], tokenizer, max_length=60, truncation="right")[0]
    assert all(torch.equal(cut[key], whole[key][:60]) for key in whole)
    with pytest.raises(ValueError, match=f"row 0 has {len(whole['input_ids'])} tokens, more than data.max_length=60"):
        dataset_of(tmp_path, [MESSAGES], tokenizer, max_length=60)[0]


@pytest.mark.parametrize("options", [{"pad_mode": "right"}, {"truncation": "left"}])
def test_padding_and_truncation_from_the_left_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="no_padding"):
        dataset_of(tmp_path, [MESSAGES], make_tokenizer(), **options)


@pytest.mark.parametrize(
    "roles", [[], ["user"], ["assistant"], ["user", "assistant", "tool"], ["user", "assistant", "user"]]
)
def test_other_conversations_are_refused(roles):
    with pytest.raises(ValueError, match="expected system, user"):
        DemonstrationEncoder(make_tokenizer()).encode([{"role": role, "content": "x"} for role in roles])


def test_a_tokenizer_must_have_an_end():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        DemonstrationEncoder(tokenizer)


# ---- environment=chat ----


def test_a_call_in_tags_becomes_the_templates_own(tokenizer):
    """The oracle is the chat template's rendering of the whole conversation."""
    functions = default_functions(["search"])
    ids, mask = ChatEncoder(tokenizer, ["search"], model_type="qwen2").encode(MESSAGES)
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "q"}}}
    called = {"role": "assistant", "content": "<think>t</think>", "tool_calls": [call]}
    messages = [*MESSAGES[:2], called, *MESSAGES[3:]]
    text = tokenizer.apply_chat_template(messages, tools=functions, tokenize=False)
    assert tokenizer.decode(ids) + "\n" == text and "</tool_call>" in text
    learnt = tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts])
    body = '<think>t</think>\n<tool_call>\n{"name": "search", "arguments": {"query": "q"}}\n</tool_call>'
    assert learnt == f"{body}{END_OF_TURN}{END}{END_OF_TURN}"


def test_other_tools_stand_in_a_file(tmp_path):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"type": "function", "function": {"name": "twice", "description": "", "parameters": parameters}}
    write_tiny_model(tmp_path / "model")
    (tmp_path / "tools.json").write_text(json.dumps([function]))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [MESSAGES[1], {"role": "assistant", "content": '<twice>{"a": 2}</twice>'}, MESSAGES[3], MESSAGES[4]]
    ids, _ = encoder_of(tokenizer, "chat", ["twice"], None, str(tmp_path / "tools.json")).encode(messages)
    assert '{"name": "twice", "arguments": {"a": 2}}' in tokenizer.decode(ids)
    with pytest.raises(ValueError, match="tool_tags: twice is none of python, search: give the tools' functions"):
        encoder_of(tokenizer, "chat", ["twice"])
    with pytest.raises(ValueError, match="environment=gym: expected tools or chat"):
        encoder_of(tokenizer, "gym", ["search"])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([MESSAGES[1], MESSAGES[4], MESSAGES[3], MESSAGES[4]], "message 2: expected a tool's message behind a call"),
        ([MESSAGES[1], MESSAGES[2], MESSAGES[4]], "message 2: expected a tool's message behind a call"),
        (
            [MESSAGES[1], {"role": "assistant", "content": CALL + CALL}, MESSAGES[3], MESSAGES[4]],
            "several calls in one",
        ),
    ],
)
def test_parts_that_no_rollout_makes_are_refused(messages, problem):
    with pytest.raises(ValueError, match=problem):
        ChatEncoder(make_tokenizer(), ["search"], model_type="qwen2").encode(messages)


def test_a_tag_without_a_function_is_named():
    functions = default_functions(["search"])
    with pytest.raises(ValueError, match="no function for the tags lookup"):
        ChatEncoder(make_tokenizer(), ["search", "lookup"], model_type="qwen2", functions=functions)


def test_a_tools_tags_are_those_that_the_rollout_shows():
    messages = [*MESSAGES[1:3], {"role": "tool", "content": "<answer>1</answer>"}, MESSAGES[4]]
    ids, mask = ChatEncoder(make_tokenizer(), ["search"], model_type="qwen2").encode(messages)
    shown = make_tokenizer().decode([token for token, counts in zip(ids, mask, strict=True) if not counts])
    assert "<answer>" not in shown and "answer" in shown
