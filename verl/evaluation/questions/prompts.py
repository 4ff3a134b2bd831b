"""A benchmark's questions as messages to a model, with instructions on how to answer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl.utils.reward_score.tool_format import TOOL_TAGS

STYLES = ("boxed", "answer", "plain")
BOXED_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
_TOOLS = {"search": "a query for a search engine", "python": "a Python program, whose output you get"}
_ANSWER = r"Then give the answer alone, boxed, between <answer> and </answer>, as in <answer>\boxed{Paris}</answer>."


class Question(NamedTuple):
    """A question and its answers."""

    id: str  # unique in the benchmark, whichever other questions are asked
    text: str  # the bare question, as a judge sees it
    prompt: list[dict]  # messages to the model (`role`, `content`)
    answers: list[str]  # the golden answers, each of which is right
    task: Any = None  # the row's `extra_info.environment`, the task for an environment with state


def to_messages(text: str, style: str, tool_tags: Sequence[str] = TOOL_TAGS, system: str | None = None) -> list[dict]:
    """Return the prompt for a bare question.

    Args:
        style: `boxed` asks for \\boxed, as training data do; `answer` explains the tags of `tool_format` in a system
            message; `plain` adds nothing.
        tool_tags: tags of the tools that the style `answer` explains.
        system: a system message instead of the style's, such as that of a checkpoint's training data.
    """
    if style not in STYLES:
        raise ValueError(f"style={style!r}: choose one of {', '.join(STYLES)}")
    if system is None and style == "answer":
        system = tool_instruction(tool_tags)
    content = f"{text}\n\n{BOXED_INSTRUCTION}" if style == "boxed" else text
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": content}]


def tool_instruction(tool_tags: Sequence[str] = TOOL_TAGS) -> str:
    """Return a text that explains the protocol of `tool_format` to a model that was not trained on it."""
    tools = [f"<{tag}>…</{tag}> {_TOOLS.get(tag, f'calls the tool {tag}')}" for tag in tool_tags]
    lines = ["Answer the question. First think, between <think> and </think>."]
    if tools:
        lines.append(
            f"You may call tools: {'; '.join(tools)}. What a tool gives you comes back between <result> and </result>; "
            "think again then, and call tools as often as you need."
        )
    return " ".join([*lines, _ANSWER])


def prompt_ids_of(
    tokenizer, messages: Sequence[Mapping], template: Mapping, schemas: Sequence[dict] | None = None
) -> list[int]:
    """Return the token ids of a prompt, with descriptions of tools (`schemas`) and further options of the template."""
    tools = {"tools": schemas} if schemas else {}
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **tools, **template
    )
