"""Reads the ground truths of rewards, and refuses those with which no response could be scored.

A reward and its `check_row`, which looks at every row before a run starts, read the ground truth by the same function,
so that they cannot disagree.
"""

import json
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any


def json_object(ground_truth, expected: str) -> Mapping[str, Any]:
    """Return a ground truth with several parts, which may be JSON text; `expected` describes the parts in the error
    message."""
    content = ground_truth
    if isinstance(ground_truth, str):
        try:
            content = json.loads(ground_truth)
        except (ValueError, RecursionError):
            content = None
    if not isinstance(content, Mapping):
        raise ValueError(f"ground_truth must be an object with {expected}, or its JSON text, got {ground_truth!r}")
    return content


def whole_number(name: str, value, least: float = -math.inf, most: float = math.inf) -> int:
    """Return a part of a ground truth that must be a whole number; else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value != round(value):
        raise ValueError(f"ground_truth: {name} must be a whole number, got {value!r}")
    number = int(round(value))
    if not least <= number <= most:
        raise ValueError(f"ground_truth: {name}={number}: expected from {least} to {most}")
    return number


def as_list(name: str, value, contents: str) -> list:
    """Return a part of a ground truth that must be a non-empty list or numpy array, or raise ValueError."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"ground_truth: {name} must be a list of {contents}, got {value!r}")
    return list(value)
