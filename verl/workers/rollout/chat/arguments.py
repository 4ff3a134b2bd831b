"""Checks the arguments of a call against the tool's JSON schema, and makes an example of arguments."""

import json
from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.chat.calls import Call
from verl.workers.rollout.tools.base_tool import BaseTool
from verl.workers.rollout.tools.plain_text import one_line

MAX_SHOWN_CHARS = 200  # largest number of characters of a fault that the model reads
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
SAMPLES = {"string": "…", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


class CallFault(ValueError):
    """A call that cannot run. The model reads the message."""


def arguments_of(call: Call, tools: Mapping[str, BaseTool]) -> tuple[BaseTool, dict[str, Any]]:
    """Return the tool of a call and its arguments. Raise CallFault if the call could not be read, there is no such
    tool, or its schema does not allow the arguments."""
    if call.fault:
        raise CallFault(one_line(call.fault, MAX_SHOWN_CHARS))
    if call.name not in tools:
        raise CallFault(f"there is no tool {one_line(call.name, MAX_SHOWN_CHARS)}; the tools are {', '.join(tools)}")
    tool = tools[call.name]
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        raise CallFault(one_line(f"the arguments of {call.name} are no JSON ({error})", MAX_SHOWN_CHARS)) from error
    if not isinstance(arguments, dict):
        raise CallFault(f"the arguments of {call.name} are no JSON object")
    _check_names(call.name, tool.schema, arguments)
    return tool, arguments


def _check_names(name: str, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Check that the required arguments are there, that there are no others, and that their types are right."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if missing := [key for key in required if key not in arguments]:
        raise CallFault(f"{name} lacks the argument {', '.join(missing)}")
    unknown = [] if schema.get("additionalProperties") else [key for key in arguments if key not in properties]
    if unknown:
        shown = one_line(", ".join(unknown), MAX_SHOWN_CHARS)
        raise CallFault(f"{name} has no argument {shown}; its arguments are {', '.join(properties) or 'none'}")
    for key, value in arguments.items():
        about = properties.get(key)
        named = about.get("type") if isinstance(about, Mapping) else None
        if isinstance(named, str) and named in TYPES and not _is_of_type(value, named):
            raise CallFault(f"the argument {key} of {name} is no {named}")


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):  # which Python takes for a number
        return name == "boolean"
    return isinstance(value, TYPES[name])


def sample_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that a schema allows: the required ones, or the first one.

    >>> sample_arguments({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
    {'city': '…'}
    """
    properties = schema.get("properties") or {}
    names = schema.get("required") or list(properties)[:1]
    return {name: SAMPLES.get(_type_of(properties.get(name)), "…") for name in names}


def schema_for_parser(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function for verl's parsers, which read the types of its arguments; a type that is none of JSON
    schema's is `object`."""
    about = function["function"]
    schema = about.get("parameters") or {}
    properties = {name: {"type": _type_of(value)} for name, value in (schema.get("properties") or {}).items()}
    parameters = {"type": "object", "properties": properties, "required": list(schema.get("required") or [])}
    described = {"name": about["name"], "description": about.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _type_of(schema: Any) -> str:
    """Return the type of an argument; `object`, for any value, if its schema names not one type."""
    name = schema.get("type") if isinstance(schema, Mapping) else None
    return name if isinstance(name, str) and name in SAMPLES else "object"
