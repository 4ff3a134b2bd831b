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

MAX_DESCRIPTION_CHARS = 1000
MAX_SCHEMA_CHARS = 4000
SHOWN_KEYS = ("properties", "required", "$defs", "definitions")  # of a schema


def call_arguments(schema: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return the arguments that the model has written.

    Args:
        schema: JSON schema of the arguments, an object with `properties` and `required`.
        content: text between the tags; empty text means no arguments, {}.

    Raises:
        ToolError: the text is neither a JSON object nor allowed as plain text, or a required argument is missing.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    arguments = _json_value(content) if content.strip() else {}
    missing = [name for name in required if not isinstance(arguments, dict) or name not in arguments]
    if isinstance(arguments, dict) and not missing:
        return arguments
    if _plain_argument(schema) and content.strip():
        return {required[0]: content}  # plain text, which may happen to be JSON
    if isinstance(arguments, dict):
        raise ToolError(f"Missing arguments: {', '.join(missing)}.", kind="bad_arguments", retry=False)
    raise ToolError(f"Expected a JSON object with {', '.join(properties)}.", kind="bad_arguments", retry=False)


def describe_function(description: str, schema: Mapping[str, Any]) -> str:
    """Return a line for the prompt: a function's description, and the schema of its arguments or, if that is too long,
    their names."""
    parts = [one_line(description, MAX_DESCRIPTION_CHARS)] if description.strip() else []
    shown = json.dumps({key: schema[key] for key in SHOWN_KEYS if schema.get(key)}, ensure_ascii=False)
    if len(shown) <= MAX_SCHEMA_CHARS:
        parts.append(f"Arguments: a JSON object, {one_line(shown, MAX_SCHEMA_CHARS)}")
    else:
        names = one_line(", ".join(schema.get("properties") or {}), MAX_DESCRIPTION_CHARS)
        required = one_line(", ".join(schema.get("required") or []) or "none", MAX_DESCRIPTION_CHARS)
        parts.append(f"Arguments: a JSON object with {names}. Required are: {required}.")
    if argument := _plain_argument(schema):
        parts.append(f"The text of {argument} alone will do.")
    return " ".join(parts)


def _plain_argument(schema: Mapping[str, Any]) -> str | None:
    """Return the name of the only required argument if it is a string, so that it may be written as plain text."""
    required = schema.get("required") or []
    argument = (schema.get("properties") or {}).get(required[0]) if len(required) == 1 else None
    return required[0] if isinstance(argument, Mapping) and argument.get("type") == "string" else None


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
