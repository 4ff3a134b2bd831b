"""Reads and checks the settings of our parts: pydantic dataclasses, whose fields are the keys of a config section."""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
# every dataclass of keys uses this config: @dataclass(frozen=True, config=STRICT)
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
T = TypeVar("T")


def read_keys(cls: type[T], values: Mapping | DictConfig | None, section: str) -> T:
    """Return the typed settings of a section, a path from the config's root; missing keys get their defaults. `cls` is
    a pydantic dataclass with `config=STRICT`. An unknown key or a wrong value raises a ValueError that names it."""
    if isinstance(values, DictConfig):
        values = OmegaConf.to_container(values, resolve=True)
    try:
        # From JSON a strict dataclass accepts a mapping for a nested section; it converts nothing else.
        return TypeAdapter(cls).validate_json(json.dumps(values or {}))
    except ValidationError as error:
        raise ValueError("; ".join(in_words(each, cls, section) for each in error.errors())) from None


def in_words(error: ErrorDetails, cls: type, section: str) -> str:
    """Return our error message for one of pydantic's errors."""
    name = ".".join((section, *map(str, error["loc"])))
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return message if message.startswith(section) else f"{name}.{message}"
    if error["type"] == "unexpected_keyword_argument":
        for key in error["loc"][:-1]:
            cls = get_type_hints(cls)[str(key)]
        in_section, _, key = name.rpartition(".")
        return no_such_key(in_section, key, list(get_type_hints(cls)))
    message = error["msg"].replace("greater than or equal to", "at least").removesuffix(" after validation, not 0")
    message = re.sub("^(Input should be|String should have|List should have)", "expected", message)
    value = error["input"] if error["type"] == "literal_error" else repr(error["input"])  # quotes show a wrong type
    return f"{name}={value}: {message}"


def no_such_key(section: str, key: str, keys: Sequence[str]) -> str:
    """Return the error message for a key that a section does not have; it suggests the most similar key."""
    nearest = "".join(f"; did you mean {section}.{name}?" for name in get_close_matches(key, keys, n=1))
    return f"{section} has no key {key}; known: {', '.join(keys)}{nearest}"


def check_trajectories(config: DictConfig, name: str, formula: str, trajectories: int) -> None:
    """Check that `rollout.n` is the number of trajectories that the tree `name` grows; `formula` shows how it follows
    from the policy's keys."""
    if (n := config.actor_rollout_ref.rollout.n) != trajectories:
        raise ValueError(
            f"{ROLLOUT}.n={n}: tree={name} grows {formula} = {trajectories} trajectories; set n to {trajectories}, or "
            f"other keys under {ROLLOUT}.custom.{name}"
        )


def check_log_probs(rollout: Any, key: str, top_k: int) -> None:
    """Check that the rollout server reports log-probabilities, and those of the `top_k` most likely tokens per position
    that a policy reads; `key` sets that number."""
    if (mode := rollout.get("logprobs_mode", "processed_logprobs")) not in ("processed_logprobs", "raw_logprobs"):
        raise ValueError(
            f"{ROLLOUT}.logprobs_mode={mode}: expected processed_logprobs (of what is sampled from) or raw_logprobs"
        )
    allowed = ((rollout.get("engine_kwargs") or {}).get("vllm") or {}).get("max_logprobs") or 20
    if 0 <= allowed < top_k:
        raise ValueError(
            f"{key}={top_k}: vLLM reports at most {allowed}; raise rollout.engine_kwargs.vllm.max_logprobs"
        )
