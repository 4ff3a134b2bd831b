"""Tokenizers in the shape of model families: Qwen's real vocabulary, with the control tokens and the kind of template
that a family has; and the chat environment of one with some tools."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from tests.packages import unpacked
from verl.workers.config import MultiTurnConfig
from verl.workers.rollout.chat.calls import CallReader
from verl.workers.rollout.chat.environment import Chat
from verl.workers.rollout.chat.template import ChatTemplate, make_builder
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig

TEMPLATES = Path(__file__).with_name("templates")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Family(NamedTuple):
    """A model family, whose template is the file of its name in templates/."""

    model_type: str
    format: str  # name of the format of its calls
    special: tuple[str, ...]  # tokens; the first ends a turn, the second a text
    added: tuple[str, ...] = ("<tool_call>", "</tool_call>")  # other control tokens


CHATML = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
HARMONY = ("<|call|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
LLAMA = ("<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
GLM = ("<|observation|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
FAMILIES = {
    "qwen2_5": Family("qwen2", "hermes", CHATML),
    "qwen3": Family("qwen3", "hermes", CHATML, TAGS),
    "gpt_oss": Family("gpt_oss", "gpt-oss", HARMONY, ()),
    "llama3": Family("llama", "llama3_json", (*LLAMA, "<|python_tag|>"), ()),
    "glm": Family("glm4_moe", "glm", GLM),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    vocabulary = unpacked("dashscope==2.0.2", "dashscope/resources/qwen.tiktoken") / "dashscope/resources/qwen.tiktoken"
    core = TikTokenConverter(vocab_file=str(vocabulary), pattern=PATTERN, extra_special_tokens=[]).converted()
    core.add_special_tokens(list(family.special))
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=family.special[0],
        pad_token=family.special[1],
        chat_template=(TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n"),
        clean_up_tokenization_spaces=False,
    )


def encode(name: str, text: str) -> list[int]:
    return tokenizer_of(name).encode(text, add_special_tokens=False)


class Shelf(BaseTool):
    """Returns what it is asked for, a text; `fail` fails."""

    name, trigger_tag, argument = "shelf", "search", "query"
    summary = "Finds passages."

    async def execute(self, content: str, *, timeout: float) -> str:
        if content == "fail":
            raise ToolError("nothing there", kind="empty", retry=False)
        return f"found {content}"


class Add(BaseTool):
    """Adds numbers; its arguments have a schema."""

    name = trigger_tag = "add"
    argument = None
    summary = "Adds two numbers."
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}

    async def execute(self, content: str, *, timeout: float) -> str:
        return str(sum(json.loads(content).values()))


FUNCTIONS = str(Path(__file__).with_name("function_tools.py"))


def instance(cls: type) -> dict:
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}"}


def chat_of(name: str, tools: dict | None = None, call_limit: int = 3, **multi_turn) -> Chat:
    """The chat environment of a family; `multi_turn` are keys of upstream's section."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    reader = CallReader(family.format, tokenizer)
    template = ChatTemplate(make_builder(tokenizer, family.model_type, {}), closes=not reader.stop_token_ids)
    box = ToolBox(ToolsConfig(tool_instances=tools or {"shelf": instance(Shelf)}, call_limit=call_limit))
    return Chat(box, reader, template, MultiTurnConfig(**{"max_tool_response_length": 200} | multi_turn))
