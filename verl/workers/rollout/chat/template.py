"""Renders tool messages behind sampled tokens, by verl's builder for the model's chat template.

    … <tool_call>{…}</tool_call> <|im_end|> | \\n <|im_start|> user … 42 … <|im_end|> \\n <|im_start|> assistant \\n
    sampled, mask 1 ──────────────────────┘ └ the answer, mask 0: tool messages, and the beginning of the next turn

The builder (`verl.utils.tokenizer.continuous_token`) never decodes sampled tokens. Here they also never get fewer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl.workers.rollout.chat.calls import Call
from verl.workers.rollout.tools.plain_text import ControlTokens

MODEL = "actor_rollout_ref.model"
TEMPLATE = f"environment=chat: the chat template of {MODEL}.path"
ADVICE = f"set {MODEL}.custom_chat_template to a template with tools, or choose another environment"
QUESTION = {"role": "user", "content": "How are you?"}
FINE = "Fine."
UNKNOWN = "unknown"  # a tool's name where the model gave none


def make_builder(tokenizer, model_type: str | None, template_options: Mapping[str, Any]) -> ContinuousTokenBuilder:
    """Return verl's builder for a text model by its config's `model_type`, or the general builder for None. Raise
    ValueError if it cannot build prompts."""
    try:
        return create_continuous_token_builder(
            tokenizer, hf_model_type=model_type, chat_template_kwargs=dict(template_options)
        )
    except ValueError as error:
        raise ValueError(
            f"{MODEL}.path: environment=chat cannot build the prompts of model_type={model_type}: {error}"
        ) from error


def builder_of_model(tokenizer, path: str, template_options: Mapping[str, Any]) -> ContinuousTokenBuilder:
    """Return `make_builder` for the model of a folder or hub name."""
    return make_builder(tokenizer, PretrainedConfig.get_config_dict(path)[0].get("model_type"), template_options)


def added_tokens(turn: Sequence[int], merged: MergeResult) -> list[int]:
    """Return the tokens that follow a turn, given the builder's tokens for the turn and what follows it. Where the
    builder removes the turn's last token, such as GLM's <|observation|>, and adds it anew, the sampled token stays, and
    its copy is left out. A removed token that is not added anew stays too."""
    if merged.token_ids[: len(turn)] == list(turn):
        return merged.token_ids[len(turn) :]
    return merged.token_ids[len(turn) - merged.removed_prefix_token_count :]


class ChatTemplate:
    """The chat template of a model with tools. With `closes` a turn that ended with another token gets the template's
    end of turn first. Raise ValueError, which names the key, if it does not render calls or tool messages."""

    def __init__(self, builder: ContinuousTokenBuilder, closes: bool):
        self.builder, self.control_tokens = builder, ControlTokens(builder.tokenizer)
        call = Call("probe")
        try:
            after_call = self._end_of(self._rendered(assistant_message([call])))
            after_answer = self._end_of(self._rendered({"role": "assistant", "content": FINE}))
            self.closing = [after_call] if closes and after_call is not None else []
            self.ends = {after_call, after_answer}
            shown = builder.tokenizer.decode(self.answer([], [call], [FINE], None))
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{TEMPLATE} does not render a tool's answer: {error!r}; {ADVICE}") from error
        if FINE not in shown:
            raise ValueError(f"{TEMPLATE} leaves out a tool's answer; {ADVICE}")

    def check_tools(self, schemas: list[dict[str, Any]]) -> None:
        """Raise ValueError if the template does not describe tools to the model."""
        with_tools, without = (self.builder.build_initial_tokens([QUESTION], tools=tools) for tools in (schemas, None))
        if with_tools == without:
            raise ValueError(f"{TEMPLATE} does not describe the tools; {ADVICE}")

    def answer(
        self, turn: Sequence[int], calls: Sequence[Call], texts: Sequence[str], schemas: list[dict[str, Any]] | None
    ) -> list[int]:
        """Return `after` for the answers to a turn's calls, texts without control tokens."""
        calls = [replace(call, arguments="{}") for call in calls]
        after = [  # with the keys that verl's agent loop gives them
            {"role": "tool", "content": text} | ({} if call.id is None else {"tool_call_id": call.id})
            for call, text in zip(calls, texts, strict=True)
        ]
        return self.after(turn, assistant_message(calls), after, schemas)

    def after(
        self,
        turn: Sequence[int],
        said: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        schemas: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the tokens that follow a turn: its end if it lacks one, messages, of which the last is not the
        assistant's, and the next turn's beginning. `said` is the turn's message, of which the builder reads the
        calls."""
        closing = [] if turn and turn[-1] in self.ends else self.closing
        closed, before = [*turn, *closing], [QUESTION, dict(said)]
        merged = self.builder.merge_context_tokens(before, [*before, *map(dict, messages)], closed, tools=schemas)
        return [*closing, *added_tokens(closed, merged)]

    @cached_property
    def _beginning(self) -> list[int]:
        """The tokens with which a turn begins."""
        return self.builder.render_delta_token_id([QUESTION], [], add_generation_prompt=True)

    def message(self, turn: Sequence[int], message: dict[str, Any]) -> list[int]:
        """Return the tokens of a message that follows a turn without calls, as `answer` does for tool messages."""
        return self.after(turn, {"role": "assistant", "content": FINE}, [message])

    def extended(self, read: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """Return a prompt with further messages, the assistant's first; None if it does not end with a turn's
        beginning."""
        n = len(self._beginning)
        if list(read[-n:]) != self._beginning:
            return None
        return [
            *read[:-n],
            *self.builder.render_delta_token_id([QUESTION], list(map(dict, messages)), add_generation_prompt=True),
        ]

    def turn(self, text: str, calls: Sequence[Call]) -> list[int]:
        """Return the tokens of a turn as the template renders it, up to its end token."""
        tokens, begin = self._rendered(assistant_message(calls) | {"content": text}), self._beginning
        tokens = tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens
        ends = [i for i, token in enumerate(tokens) if token in self.ends]
        return tokens[: ends[-1] + 1] if ends else tokens

    def _rendered(self, message: dict[str, Any]) -> list[int]:
        """Return the tokens of a message of the assistant, behind a question."""
        try:
            return self.builder.render_delta_token_id([QUESTION], [message])
        except TypeError:  # a template such as DeepSeek's writes the arguments as they are, and needs a text
            calls = [call["function"] for call in message.get("tool_calls", ())]
            calls = [call | {"arguments": json.dumps(call["arguments"])} for call in calls]
            as_text = [{"type": "function", "function": call} for call in calls]
            return self.builder.render_delta_token_id([QUESTION], [message | {"tool_calls": as_text}])

    def _end_of(self, tokens: Sequence[int]) -> int | None:
        """Return the special token that ends a message; None if the message ends with other text."""
        last = max((i for i, token in enumerate(tokens) if token in self.control_tokens.special), default=None)
        if last is None or self.builder.tokenizer.decode(tokens[last + 1 :]).strip():
            return None
        return tokens[last]


def assistant_message(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the message of a turn with these calls, of which the builder reads names and ids."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": call.name or UNKNOWN, "arguments": _object(call.arguments)},
                **({} if call.id is None else {"id": call.id}),
            }
            for call in calls
        ],
    }


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
