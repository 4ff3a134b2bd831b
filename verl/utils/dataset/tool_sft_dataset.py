"""Demonstrations with tools for supervised training, in the tokens that a rollout with tools would produce.

A rollout appends tokens to a single assistant response: the model's, then the tool's result, which is encoded on its
own, then the model's again. verl's own dataset puts the chat template's marks around each message and masks whole
messages; here a row

    [{system}, {user}, {assistant: "…</search>"}, {tool: "the text found"}, {assistant: "…</answer>"}]

becomes the following, where each part is encoded on its own and only the assistant's parts count in the loss:

    prompt by the chat template | …</search> | ␣<result>\\n the text found \\n</result> | …</answer> | end of sequence
    mask 0                        1            0                                         1             1

A config names it by `data.custom_cls: {path: pkg://verl.utils.dataset.tool_sft_dataset, name: ToolSFTDataset}`.
"""

import sys

import torch
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.tokenizer.tokenizer import normalize_token_ids

from verl.utils.reward_score.tool_format import TOOL_TAGS
from verl.workers.rollout.tools.protocol import MOST_CHARACTERS_A_TOKEN, Protocol


class DemonstrationEncoder:
    """Turns messages into token ids and a loss mask.

    The tokenizer needs a chat template, and an end-of-sequence token, at which rollouts stop. `chat_template_kwargs`
    are `data.apply_chat_template_kwargs` of the RL run.
    """

    def __init__(self, tokenizer, tool_tags=TOOL_TAGS, chat_template_kwargs=None):
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no eos_token: a response would never end")
        self.tokenizer, self.chat_template_kwargs = tokenizer, dict(chat_template_kwargs or {})
        self.protocol = Protocol(tokenizer, tuple(tool_tags))

    def encode(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Return token ids, and a mask of the same length (1: the token counts in the loss).

        Raises:
            ValueError: the messages are not a prompt and a response that ends with the assistant; names the roles.
        """
        roles = [message["role"] for message in messages]
        start = roles.index("assistant") if "assistant" in roles else len(roles)
        prompt, response = messages[:start], messages[start:]
        if not prompt or not response or set(roles[start:]) - {"assistant", "tool"} or roles[-1] != "assistant":
            raise ValueError(f"expected system, user, then assistant, tool, assistant, …, assistant; got {roles}")
        ids = normalize_token_ids(
            self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, **self.chat_template_kwargs
            )
        )
        mask = [0] * len(ids)
        for message in response:
            by_model = message["role"] == "assistant"
            part = self._model_ids(message["content"]) if by_model else self._result_ids(message["content"])
            ids += part
            mask += [int(by_model)] * len(part)
        return [*ids, self.tokenizer.eos_token_id], [*mask, 1]

    def _model_ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _result_ids(self, text: str) -> list[int]:
        return self.protocol.result_ids(text, max_tokens=sys.maxsize // MOST_CHARACTERS_A_TOKEN)


class ToolSFTDataset(MultiTurnSFTDataset):
    """verl's multi-turn dataset with each row encoded by `DemonstrationEncoder`.

    It reads these keys of `data`: `messages_key`, `max_length` (tokens), `truncation` (`error` or `right`, which cuts),
    `tool_tags`, `apply_chat_template_kwargs`, and verl's keys that select rows. `pad_mode` must be no_padding.
    """

    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples: int = -1):
        super().__init__(parquet_files, tokenizer, config, processor, max_samples)
        if self.pad_mode != "no_padding" or self.truncation not in ("error", "right"):
            raise ValueError(
                f"data.pad_mode={self.pad_mode}, data.truncation={self.truncation}: "
                "tool demonstrations need no_padding, and error or right"
            )
        tool_tags = config.get("tool_tags") or TOOL_TAGS
        self.encoder = DemonstrationEncoder(self.tokenizer, tool_tags, self.apply_chat_template_kwargs)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `position_ids` and `loss_mask`, int64 of shape (tokens,)."""
        ids, mask = self.encoder.encode(self.messages[item])
        if len(ids) > self.max_length and self.truncation == "error":
            raise ValueError(f"row {item} has {len(ids)} tokens, more than data.max_length={self.max_length}")
        input_ids = torch.tensor(ids[: self.max_length])
        return {
            "input_ids": input_ids,
            "position_ids": torch.arange(len(input_ids)),
            "loss_mask": torch.tensor(mask[: self.max_length]),
        }
