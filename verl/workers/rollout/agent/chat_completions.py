"""The form of OpenAI's chat completions: which parameters a request may have, replies, streams and errors.

The trainer chooses how tokens are sampled: parameters that would change that are ignored, and parameters that promise
what the rollout cannot give are refused. Equal replies give equal bytes: ids hold the reply's number in its session,
and `created` is 0.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse


@dataclass(frozen=True)
class Reply:
    """A turn of the model.

    Args:
        tool_calls: name and arguments, as JSON text, of each call.
        finish_reason: `stop`, `tool_calls` or `length`.
    """

    content: str
    tool_calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ApiError(HTTPException):
    """An error that the program's client gets in OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, message)
        self.param, self.code = param, code


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_function(value: Any) -> bool:
    """Return whether a value is a tool, or a choice of one, of the type `function`."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_tool_choice(value: Any) -> bool:
    return value in ("auto", "none", "required") or _is_function(value)


def _is_stop(value: Any) -> bool:
    return all(isinstance(text, str) and text for text in (value if isinstance(value, list) else [value]))


SAMPLING = frozenset(
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty logit_bias".split()
)
UNUSED = frozenset("messages parallel_tool_calls user metadata store".split())
# values that a parameter may have, and the check of a value; null is always valid
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a text", lambda value: isinstance(value, str)),
    "tools": ("a list of functions", lambda value: isinstance(value, list) and all(map(_is_function, value))),
    "tool_choice": ("auto, none, required or a function", _is_tool_choice),
    "stop": ("a text, or a list of texts", _is_stop),
    "max_tokens": ("a positive integer", _is_count),
    "max_completion_tokens": ("a positive integer", _is_count),
    "stream": ("true or false", lambda value: isinstance(value, bool)),
    "stream_options": ("an object", lambda value: isinstance(value, dict)),
    "n": ("1; each request gets one reply", lambda value: value == 1),
    "logprobs": ("false; replies have no log-probabilities", lambda value: value is False),
    "top_logprobs": ("0; replies have no log-probabilities", lambda value: value == 0),
    "response_format": ('{"type": "text"}; no other can be enforced', lambda value: value == {"type": "text"}),
    "modalities": ('["text"]; replies are texts', lambda value: value == ["text"]),
    "audio": ("null; replies are texts", lambda value: False),
    "functions": ("null; use tools", lambda value: False),
    "function_call": ("null; use tool_choice", lambda value: False),
}


def ignored_parameters(body: Mapping[str, Any]) -> dict[str, str]:
    """Return a request's parameters that are ignored, with the reason; raise ApiError (400) for a refused value."""
    ignored = {}
    for name, value in body.items():
        if value is None or name in UNUSED:
            continue
        if name in EXPECTED:
            expected, is_valid = EXPECTED[name]
            if not is_valid(value):
                raise ApiError(400, f"{name}: expected {expected}", name)
        else:
            ignored[name] = "the trainer chooses how tokens are sampled" if name in SAMPLING else "it is unknown"
    if body.get("tool_choice") not in (None, "auto", "none"):
        ignored["tool_choice"] = "the model cannot be made to call a tool"
    return ignored


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
