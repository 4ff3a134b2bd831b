"""Messages of a chat-completions request in one form, so that equal ones are found.

A program sends back what the model said with other keys than it got: `content` null or empty, arguments with other
blanks, ids of its own. What is left here is what a chat template reads.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AgentRequest:
    """A request that the model should answer: messages as the template reads them (`plain_message`), tools in OpenAI's
    format, texts that end the answer and are not part of it, and the largest number of the answer's tokens."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    # what is compared, without what is ignored: a text for each message, and one for the other fields
    texts: tuple[str, ...] = field(default=(), compare=False)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, AgentRequest) and self.texts == other.texts

    def __hash__(self) -> int:
        return hash(self.texts)

    def follows(self, earlier: "AgentRequest") -> bool:
        """Return whether an earlier request's messages are the first of this one, with the same tools."""
        n = len(earlier.messages)
        return self.texts[:n] == earlier.texts[:n] and len(self.messages) > n and self.tools == earlier.tools


def agent_request(body: Mapping[str, Any], ignored: Sequence[str] = ()) -> AgentRequest:
    """Return a request from the body of a POST to /chat/completions; raise ValueError, which names the field, for
    another form. What the regular expressions `ignored` match in texts, such as a date, is not compared."""
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ValueError("messages: expected a list of messages")
    messages = tuple(plain_message(message) for message in body["messages"])
    if messages[-1]["role"] == "assistant":
        raise ValueError("messages: the last one is the assistant's, and is not continued")
    tools = () if body.get("tool_choice") == "none" else tuple(body.get("tools") or ())
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    parts = [_without(part, ignored) for part in (*messages, [tools, stop, max_tokens])]
    texts = tuple(json.dumps(part, sort_keys=True, ensure_ascii=False) for part in parts)
    return AgentRequest(messages, tools, stop, max_tokens, texts)


def plain_message(message: Any) -> dict[str, Any]:
    """Return a message with its role, text and calls only; raise ValueError if it is no message, or holds more than
    text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError("messages: expected objects with a role")
    role = {"developer": "system"}.get(message["role"], message["role"])
    plain: dict[str, Any] = {"role": role, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": call["function"]["name"], "arguments": _arguments(call)}}
            for call in calls
        ]
    if role == "tool" and message.get("name"):
        plain["name"] = message["name"]
    return plain


def _without(value: Any, ignored: Sequence[str]) -> Any:
    """Return a JSON value without what the patterns match in its texts."""
    if isinstance(value, dict):
        return {key: _without(item, ignored) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, ignored) for item in value]
    if isinstance(value, str):
        for pattern in ignored:
            value = re.sub(pattern, "", value)
    return value


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [
            part.get("text") if part.get("type") in ("text", "input_text", "output_text") else None for part in content
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise ValueError("messages: expected texts as contents")


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call["function"].get("arguments") or "{}"
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
