"""Renames the keys under `hato` from HATO's design notes to ours, so that configs in the notes' form work."""

from copy import deepcopy
from typing import Any

# The notes' key -> our key, each with its section.
OUR_KEYS = {
    "uncertainty.type": "uncertainty.method",
    "uncertainty.dropout_rate": "uncertainty.model_config.dropout",
    "meta_learning.type": "meta_learning.method",
    "memory.pruning_threshold": "exploration.pruning_threshold",
    "memory.max_nodes": "tree.max_nodes",
}
# uncertainty.method -> the notes' key for uncertainty.n_passes. The key of another method has no effect.
PASSES = {"dropout": "n_forward_passes", "bootstrap": "n_bootstrap"}


def in_our_names(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the values under `hato` with the notes' keys renamed to ours.

    Args:
        values: the section `hato` of a config; it is not changed.
        defaults: our default of every key. The YAML sets every key, so a key that holds its default does not
            contradict the notes' key.

    Raises:
        ValueError: a key of the notes and ours have different values, or `outer_lr` is set for maml.
    """
    values = deepcopy(values)
    for theirs, ours in OUR_KEYS.items():
        _rename(values, theirs, ours, defaults)
    meta = values.get("meta_learning")
    if isinstance(meta, dict) and "outer_lr" in meta:
        if meta.get("method", defaults["meta_learning"]["method"]) == "maml":
            raise ValueError(
                f"hato.meta_learning.outer_lr={meta['outer_lr']}: the outer step of maml is one of the actor's "
                "optimizer: leave it out, and set actor_rollout_ref.actor.optim.lr"
            )
        meta.pop("outer_lr")  # Reptile does not read it.
    uncertainty = values.get("uncertainty")
    if isinstance(uncertainty, dict):
        method = uncertainty.get("method", defaults["uncertainty"]["method"])
        for reader, name in PASSES.items():
            if reader == method:
                _rename(values, f"uncertainty.{name}", "uncertainty.n_passes", defaults)
            else:
                uncertainty.pop(name, None)
    return values


def _rename(values: dict, theirs: str, ours: str, defaults: dict) -> None:
    section, _, key = theirs.rpartition(".")
    *sections, our_key = ours.split(".")
    source, target = values.get(section), values
    if not isinstance(source, dict) or key not in source:
        return
    for name in sections:
        target, defaults = target.setdefault(name, {}), defaults[name]
        if not isinstance(target, dict):
            return  # the check of types reports this
    value, present = source.pop(key), target.get(our_key, defaults[our_key])
    if present not in (value, defaults[our_key]):
        raise ValueError(f"hato.{theirs}={value} is hato.{ours}={value}, and not {present}: leave out one")
    target[our_key] = value
