"""Demonstrations with tools for supervised training, in the tokens that a rollout with tools would produce.

A rollout appends tokens to a single assistant response: the model's, then the tool's result, which is encoded on its
own, then the model's again. verl's own dataset puts the chat template's marks around each message and masks whole
messages; here a row

    [{system}, {user}, {assistant: "…</search>"}, {tool: "the text found"}, {assistant: "…</answer>"}]

becomes the following, where each part is encoded on its own and only the assistant's parts count in the loss:

    prompt by the chat template | …</search> | ␣<result>\\n the text found \\n</result> | …</answer> | end of sequence
    mask 0                        1            0                                         1             1

With `data.environment=chat`, as in an RL run with environment=chat, a call at the end of an assistant's part becomes a
call in the words of the chat template, and the tool's text becomes a tool message:

    prompt, with the tools | … <tool_call>{"name": "search", …}</tool_call><|im_end|> | … tool message … | …
    mask 0                   1                                                          0                  1

A config names it by `data.custom_cls: {path: pkg://verl.utils.dataset.tool_sft_dataset, name: ToolSFTDataset}`.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PretrainedConfig
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.tokenizer.tokenizer import normalize_token_ids

from verl.utils.reward_score.tool_format import TOOL_TAGS
from verl.workers.rollout.chat.calls import Call
from verl.workers.rollout.chat.environment import result_text
from verl.workers.rollout.chat.template import ChatTemplate, make_builder
from verl.workers.rollout.tools.base_tool import function_of, text_schema
from verl.workers.rollout.tools.function_calls import call_arguments
from verl.workers.rollout.tools.protocol import MAX_CHARS_PER_TOKEN, Protocol
from verl.workers.rollout.tools.python.tool import PythonTool
from verl.workers.rollout.tools.search.tool import LocalSearchTool


class DemonstrationEncoder:
    """Turns messages into token ids and a loss mask. The tokenizer needs a chat template, and an end-of-sequence token,
    at which rollouts stop. `chat_template_kwargs` are `data.apply_chat_template_kwargs` of the RL run."""

    def __init__(self, tokenizer, tool_tags=TOOL_TAGS, chat_template_kwargs=None):
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no eos_token: a response would never end")
        self.tokenizer, self.chat_template_kwargs = tokenizer, dict(chat_template_kwargs or {})
        self.protocol = Protocol(tokenizer, tuple(tool_tags))

    def encode(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Return token ids, and a mask of the same length (1: the token counts in the loss)."""
        prompt, response = split_messages(messages)
        ids = normalize_token_ids(
            self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, **self.chat_template_kwargs
            )
        )
        mask = [0] * len(ids)
        for message in response:
            by_model = message["role"] == "assistant"
            if by_model:
                part = self.tokenizer.encode(message["content"], add_special_tokens=False)
            else:
                part = self.protocol.result_ids(message["content"], sys.maxsize // MAX_CHARS_PER_TOKEN)
            ids += part
            mask += [int(by_model)] * len(part)
        return [*ids, self.tokenizer.eos_token_id], [*mask, 1]


def split_messages(messages: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return the prompt and the response; raise a ValueError with the roles if they are in another order."""
    roles = [message["role"] for message in messages]
    start = roles.index("assistant") if "assistant" in roles else len(roles)
    if not 0 < start < len(roles) or set(roles[start:]) - {"assistant", "tool"} or roles[-1] != "assistant":
        raise ValueError(f"expected system, user, then assistant, tool, assistant, …, assistant; got {roles}")
    return messages[:start], messages[start:]


class ChatEncoder(DemonstrationEncoder):
    """Turns messages into token ids and a loss mask, with the calls of `environment=chat`, for the `model_type` of a
    config.json. `functions` are the tools in OpenAI's format; None for `default_functions`."""

    def __init__(self, tokenizer, tool_tags=TOOL_TAGS, chat_template_kwargs=None, model_type=None, functions=None):
        super().__init__(tokenizer, tool_tags, chat_template_kwargs)
        self.functions = default_functions(tool_tags) if functions is None else functions
        if unknown := set(tool_tags) - {tool["function"]["name"] for tool in self.functions}:
            raise ValueError(f"tool_functions: there is no function for the tags {', '.join(sorted(unknown))}")
        self.template = ChatTemplate(make_builder(tokenizer, model_type, self.chat_template_kwargs), closes=True)
        self.template.check_tools(self.functions)
        self._closing = re.compile(rf"</({'|'.join(map(re.escape, tool_tags))})>")
        self._call = re.compile(rf"(.*)<({'|'.join(map(re.escape, tool_tags))})>(.*)</\2>\s*", re.DOTALL)

    def encode(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        prompt, response = split_messages(messages)
        ids = list(self.template.builder.build_initial_tokens(prompt, tools=self.functions))
        mask = [0] * len(ids)
        turn: list[int] = []
        call: Call | None = None
        for i, message in enumerate(response):
            if (message["role"] == "tool") != (call is not None):
                raise ValueError(
                    f"message {len(prompt) + i}: expected a tool's message behind a call, and nowhere else"
                )
            if call is None:
                text, call = self._parts(message["content"])
                turn = part = self.template.turn(text, [call] if call else [])
                if not self.tokenizer.decode(part).startswith(text):
                    raise ValueError(f"the chat template does not render this part as it is: {text[:80]!r}")
            else:
                part = self.template.answer(
                    turn, [call], [result_text(self.template, message["content"])], self.functions
                )
                call = None
            ids += part
            mask += [int(message["role"] == "assistant")] * len(part)
        return ids, mask

    def _parts(self, text: str) -> tuple[str, Call | None]:
        """Return a part's text and its call; raise ValueError if there are several."""
        if (call := self._call.fullmatch(text)) is None:
            return text, None
        before, tag, content = call.groups()
        if self._closing.search(before):
            raise ValueError(f"several calls in one part: {text[:80]!r}")
        function = next(tool["function"] for tool in self.functions if tool["function"]["name"] == tag)
        arguments = call_arguments(function["parameters"], content.strip())
        return before.rstrip(), Call(tag, json.dumps(arguments, ensure_ascii=False))


def default_functions(tool_tags: Iterable[str]) -> list[dict]:
    """Return the search and Python tools in OpenAI's format."""
    tools = {tool.trigger_tag: tool for tool in (PythonTool, LocalSearchTool)}
    if unknown := [tag for tag in tool_tags if tag not in tools]:
        raise ValueError(f"tool_tags: {', '.join(unknown)} is none of {', '.join(tools)}: give the tools' functions")
    return [function_of(tag, tools[tag].summary, text_schema(tools[tag].argument)) for tag in tool_tags]


def encoder_of(
    tokenizer, environment: str, tool_tags: Iterable[str], chat_template_kwargs=None, functions_file: str | None = None
) -> DemonstrationEncoder:
    """Return the encoder for an environment."""
    if environment == "tools":
        return DemonstrationEncoder(tokenizer, tool_tags, chat_template_kwargs)
    if environment != "chat":
        raise ValueError(f"environment={environment}: expected tools or chat")
    functions = json.loads(Path(functions_file).read_text(encoding="utf-8")) if functions_file else None
    model_type = PretrainedConfig.get_config_dict(tokenizer.name_or_path)[0].get("model_type")
    return ChatEncoder(tokenizer, tool_tags, chat_template_kwargs, model_type, functions)


class FullBatchSFTDataset(MultiTurnSFTDataset):
    """verl's multi-turn dataset with at least the rows of a batch. Upstream's trainer drops an incomplete batch:
    without a full one, validation gives NaN, and training divides by 0."""

    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples: int = -1):
        super().__init__(parquet_files, tokenizer, config, processor, max_samples)
        if len(self) < (batch := config.get("train_batch_size", 1)):
            raise ValueError(f"{parquet_files} has {len(self)} rows, expected at least data.train_batch_size={batch}")


class ToolSFTDataset(FullBatchSFTDataset):
    """verl's multi-turn dataset with each row encoded by `DemonstrationEncoder`, or `ChatEncoder`.

    It reads these keys of `data`: `messages_key`, `max_length` (tokens), `truncation` (`error` or `right`, which cuts),
    `tool_tags`, `environment` (`tools` or `chat`), `tool_functions` (a JSON file with the tools in OpenAI's format, for
    `chat` with other tools than search and Python), `apply_chat_template_kwargs`, and verl's keys that select rows.
    `pad_mode` must be no_padding.
    """

    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples: int = -1):
        super().__init__(parquet_files, tokenizer, config, processor, max_samples)
        if self.pad_mode != "no_padding" or self.truncation not in ("error", "right"):
            raise ValueError(
                f"data.pad_mode={self.pad_mode}, data.truncation={self.truncation}: "
                "tool demonstrations need no_padding, and error or right"
            )
        self.encoder = encoder_of(
            self.tokenizer,
            config.get("environment") or "tools",
            config.get("tool_tags") or TOOL_TAGS,
            self.apply_chat_template_kwargs,
            config.get("tool_functions"),
        )

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
