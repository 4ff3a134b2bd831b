"""The length of upstream's padding rows."""

import torch

from verl.trainer.ppo import padding_utils
from verl_patches.short_padding_rows import shorten_padding_rows


def test_a_padding_row_is_one_token_of_a_prompt_and_one_of_a_response(monkeypatch):
    monkeypatch.setattr(padding_utils, "SYNTHETIC_PADDING_SEQ_LEN", 128)
    shorten_padding_rows()
    source = {"prompts": torch.arange(7), "responses": torch.arange(5), "position_ids": torch.arange(12)}
    row, tag = padding_utils.construct_minimal_padding_template(source, {"status": "success"}, eos_token_id=2)
    assert row["input_ids"].tolist() == [2, 2] and row["position_ids"].tolist() == [0, 1]
    assert len(row["prompts"]) == len(row["responses"]) == 1
    assert tag["is_padding"] and (tag["prompt_len"], tag["response_len"], tag["seq_len"]) == (1, 1, 2)
