"""Calls of functions that have a JSON schema, such as verl's own tools and those of MCP servers.

<weather>{"city": "Paris", "days": 2}</weather>    arguments as a JSON object
<search>who tends otters</search>                   plain text, if the only required argument is a string
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.plain_text import one_line

MAX_SHOWN_CHARS = 200  # largest number of characters of a fault that the model reads
TYPES: dict[str, Any] = dict(string=str, integer=int, number=(int, float), boolean=bool, array=list, object=dict)


def call_arguments(schema: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return the arguments that the model has written between the tags, by the JSON schema of an object.

    Empty text means none. Raise ToolError for a text that is neither a JSON object with all arguments nor plain text
    for a schema that allows it.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    arguments = _json_value(content) if content.strip() else {}
    missing = [name for name in required if not isinstance(arguments, dict) or name not in arguments]
    if isinstance(arguments, dict) and not missing:
        return arguments
    only = properties.get(required[0]) if len(required) == 1 else None
    if isinstance(only, Mapping) and only.get("type") == "string" and content.strip():
        return {required[0]: content}  # plain text, which may happen to be JSON
    if isinstance(arguments, dict):
        raise ToolError(f"Missing arguments: {', '.join(missing)}.", kind="bad_arguments", retry=False)
    raise ToolError(f"Expected a JSON object with {', '.join(properties)}.", kind="bad_arguments", retry=False)


def wrong_argument(name: str, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments for a function: one is missing, unknown or of another type."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if missing := [key for key in required if key not in arguments]:
        return f"{name} lacks the argument {', '.join(missing)}"
    unknown = [] if schema.get("additionalProperties") else [key for key in arguments if key not in properties]
    if unknown:
        shown = one_line(", ".join(unknown), MAX_SHOWN_CHARS)
        return f"{name} has no argument {shown}; its arguments are {', '.join(properties) or 'none'}"
    for key, value in arguments.items():
        about = properties.get(key)
        named = about.get("type") if isinstance(about, Mapping) else None
        if not isinstance(named, str) or named not in TYPES:
            continue
        is_wrong_bool = isinstance(value, bool) and named != "boolean"  # Python takes it for a number
        if is_wrong_bool or not isinstance(value, TYPES[named]):
            return f"the argument {key} of {name} is no {named}"
    return None


def _json_value(content: str) -> Any:
    """Return the value that a JSON text holds; None for any text that cannot be sent on as JSON."""
    try:
        value = json.loads(content, parse_constant=_refuse)
        to_json([[[[value]]]])  # half a character, or lists within lists beyond what a request may hold
    except (ValueError, RecursionError):
        return None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
