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
MAX_REFERENCES = 200  # of a schema that are resolved


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
    if _plain_argument(schema) and content.strip():
        return {required[0]: content}  # plain text, which may happen to be JSON
    if isinstance(arguments, dict):
        raise ToolError(f"Missing arguments: {', '.join(missing)}.", kind="bad_arguments", retry=False)
    raise ToolError(f"Expected a JSON object with {', '.join(properties)}.", kind="bad_arguments", retry=False)


def describe_function(description: str, schema: Mapping[str, Any]) -> str:
    """Return a line for the prompt: a function's description and its arguments. Of too many properties the last ones,
    optional ones first, are only named."""
    parts = [one_line(description, MAX_DESCRIPTION_CHARS)] if description.strip() else []
    properties, required = resolved_schema(schema).get("properties") or {}, schema.get("required") or []
    named, left = [], MAX_SCHEMA_CHARS
    for name in sorted(properties, key=lambda name: name not in required):
        size = len(json.dumps({name: properties[name]}, ensure_ascii=False))
        if size <= left:
            left -= size
        else:
            named.append(name)
    shown = {name: about for name, about in properties.items() if name not in named}
    required_shown = [name for name in required if name not in named]
    text = json.dumps({"properties": shown, "required": required_shown}, ensure_ascii=False)
    parts.append(f"Arguments: a JSON object, {one_line(text, len(text))}")
    if named:
        parts.append(f"More arguments: {one_line(', '.join(named), MAX_DESCRIPTION_CHARS)}.")
    if argument := _plain_argument(schema):
        parts.append(f"The text of {argument} alone will do.")
    return " ".join(parts)


def resolved_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema with each `$ref` replaced by the part of the schema to which it points.

    >>> resolved_schema({"properties": {"n": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}})
    {'properties': {'n': {'type': 'integer'}}}

    A reference to itself, to another document or beyond MAX_REFERENCES becomes {}, which allows anything.
    """
    left = MAX_REFERENCES

    def resolved(value: Any, inside: tuple[str, ...]) -> Any:
        nonlocal left
        if isinstance(value, list):
            return [resolved(each, inside) for each in value]
        if not isinstance(value, Mapping):
            return value
        plain = {key: resolved(each, inside) for key, each in value.items() if key not in ("$ref", "$defs")}
        reference = value.get("$ref")
        if not isinstance(reference, str) or reference in inside or left == 0:
            return plain
        left -= 1
        target = resolved(_pointed_at(schema, reference), (*inside, reference))
        return target | plain if isinstance(target, dict) else plain

    return resolved(schema, ())


def _pointed_at(schema: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a schema to which a JSON pointer such as `#/$defs/City` points; None without one."""
    first, *keys = reference.split("/")
    part: Any = schema if first == "#" else None
    for key in keys:
        part = part.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def _plain_argument(schema: Mapping[str, Any]) -> str | None:
    """Return the name of the only required argument if it is a string, so that it may be written as plain text."""
    required = schema.get("required") or []
    argument = (resolved_schema(schema).get("properties") or {}).get(required[0]) if len(required) == 1 else None
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
