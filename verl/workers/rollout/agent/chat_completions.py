"""The form of OpenAI's chat completions: requests and their messages, replies, streams and errors.

A program sends back what the model said with other keys than it got: `content` null or empty, arguments with other
blanks, ids of its own. An `AgentRequest` holds what a chat template reads, so that equal requests are found.

The trainer chooses how tokens are sampled: parameters that would change that are ignored, and those that promise what
the rollout cannot give (`ONLY_VALUES`) are refused. Equal replies give equal bytes: ids hold the reply's number in its
session, and `created` is 0.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

ONLY_VALUES = {"n": 1, "logprobs": False, "response_format": {"type": "text"}}


@dataclass(frozen=True)
class AgentRequest:
    """A request that the model should answer: messages as the template reads them (`plain_message`), tools in OpenAI's
    format, texts that end the answer and are not part of it, and the largest number of the answer's tokens."""

    messages: tuple[dict[str, Any], ...] = field(compare=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), compare=False)
    stop: tuple[str, ...] = field(default=(), compare=False)
    max_tokens: int | None = field(default=None, compare=False)
    texts: tuple[str, ...] = ()  # all that is compared: a text for each message, and one for the other fields

    def follows(self, earlier: "AgentRequest") -> bool:
        """Return whether an earlier request's messages are the first of this one, with the same tools."""
        n = len(earlier.messages)
        return self.texts[:n] == earlier.texts[:n] and len(self.messages) > n and self.tools == earlier.tools


def agent_request(body: Mapping[str, Any], ignored: Sequence[str] = ()) -> AgentRequest:
    """Return a request from the body of a POST to /chat/completions; raise ValueError, which names the field, for
    another form. What the regular expressions `ignored` match in texts, such as a date, is not compared."""
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ValueError("messages: expected a list of messages")
    for name, value in ONLY_VALUES.items():
        if body.get(name) not in (None, value):
            raise ValueError(f"{name}: expected {json.dumps(value)}; the rollout gives no other")
    for tool in body.get("tools") or ():
        if tool.get("type") != "function" or not isinstance(tool["function"]["name"], str):
            raise ValueError("tools: expected functions")
    messages = tuple(plain_message(message) for message in body["messages"])
    if messages[-1]["role"] == "assistant":
        raise ValueError("messages: the last one is the assistant's, and is not continued")
    tools = () if body.get("tool_choice") == "none" else tuple(body.get("tools") or ())
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise ValueError("stop: expected a text, or a list of texts")
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError("max_tokens: expected a positive integer")
    parts = [_without(part, ignored) for part in (*messages, [tools, stop, max_tokens])]
    texts = tuple(json.dumps(part, sort_keys=True, ensure_ascii=False) for part in parts)
    return AgentRequest(messages, tools, stop, max_tokens, texts)


def plain_message(message: Any) -> dict[str, Any]:
    """Return a message with its role, text and calls only; raise ValueError if it holds more than text."""
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
    if isinstance(value, (list, tuple)):
        return [_without(item, ignored) for item in value]
    if isinstance(value, str):
        for pattern in ignored:
            value = re.sub(pattern, "", value)
    return value


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if part.get("type") in ("text", "input_text", "output_text")]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise ValueError("messages: expected texts as contents")


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call["function"].get("arguments") or "{}"
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


@dataclass(frozen=True)
class Reply:
    """A turn of the model."""

    content: str
    tool_calls: tuple[tuple[str, str], ...] = ()  # name and arguments, as JSON text, of each call
    finish_reason: str = "stop"  # or `tool_calls` or `length`
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ApiError(HTTPException):
    """An error that the program's client gets in OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, message)
        self.param, self.code = param, code


def error_response(http: Request, error: Exception) -> JSONResponse:
    """Return an HTTP error in OpenAI's form."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if not isinstance(error, ApiError):
        message += f": {http.method} {http.url.path}; served are POST BASE_URL/chat/completions and GET BASE_URL/models"
    form = {"message": message, "type": "invalid_request_error"}
    form |= {"param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    return JSONResponse({"error": form}, error.status_code)


def _tool_calls(number: int, reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{number}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(reply.tool_calls)
    ]


def _usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(number: int, kind: str, model: str | None) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 0, "model": model or "model"}


def chat_completion(number: int, reply: Reply, model: str | None) -> dict[str, Any]:
    """Return the body of a session's reply with a number."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.tool_calls:
        message |= {"content": reply.content or None, "tool_calls": _tool_calls(number, reply)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return _head(number, "chat.completion", model) | {"choices": [choice], "usage": _usage(reply)}


def event_stream(number: int, reply: Reply, model: str | None, with_usage: bool) -> str:
    """Return a reply as the text of server-sent events, which go out together because the reply is whole."""
    said: dict[str, Any] = {"content": reply.content} if reply.content or not reply.tool_calls else {}
    if reply.tool_calls:
        said["tool_calls"] = [{"index": i} | call for i, call in enumerate(_tool_calls(number, reply))]
    head = _head(number, "chat.completion.chunk", model)
    chunks = []
    for delta, reason in (({"role": "assistant"}, None), (said, None), ({}, reply.finish_reason)):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunks.append(head | {"choices": [choice]} | ({"usage": None} if with_usage else {}))
    if with_usage:
        chunks.append(head | {"choices": [], "usage": _usage(reply)})
    return "".join(f"data: {data}\n\n" for data in [*map(json.dumps, chunks), "[DONE]"])
