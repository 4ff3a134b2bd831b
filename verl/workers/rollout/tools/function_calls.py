"""Calls of functions that have a JSON schema, such as verl's own tools and those of MCP servers.

<weather>{"city": "Paris", "days": 2}</weather>    arguments as a JSON object
<search>who tends otters</search>                   plain text, if the only required argument is a string
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from verl.workers.rollout.tools.base_tool import ToolError


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
