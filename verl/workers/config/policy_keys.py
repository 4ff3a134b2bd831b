"""Reads and checks the settings of tree policies.

A policy without a section of its own in the rollout's config has its settings in upstream's dictionary
`actor_rollout_ref.rollout.custom.<name>`. Upstream does not check it; `custom_keys` reads it into a frozen dataclass of
the policy's, whose fields are the keys.
"""

from typing import TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf

ROLLOUT = "actor_rollout_ref.rollout"
T = TypeVar("T")


def custom_keys(config: DictConfig, name: str, cls: type[T]) -> T:
    """The settings under `custom.<name>`; keys that are not there have the dataclass's defaults.

    Args:
        config: of the whole run.
        cls: a dataclass of bool, int, float and str. Its `__post_init__` may raise ValueError with a message that
            begins with the key, as `check_at_least` does.

    Raises:
        ValueError: an unknown key, a value of another type, or what the dataclass says; names the key in full.
    """
    section = f"{ROLLOUT}.custom.{name}"
    values = dict(OmegaConf.select(config, section) or {})
    types = get_type_hints(cls)
    for key, value in values.items():
        if key not in types:
            raise ValueError(f"{section}.{key}: there is no such key; known: {', '.join(types)}")
        if type(value) is not types[key] and not (types[key] is float and type(value) is int):
            raise ValueError(f"{section}.{key}={value!r}: expected {types[key].__name__}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None


def check_at_least(settings, **lowest: int) -> None:
    """
    Raises:
        ValueError: a setting is below its lowest value.
    """
    for key, low in lowest.items():
        if (value := getattr(settings, key)) < low:
            raise ValueError(f"{key}={value}: expected at least {low}")


def check_trajectories(config: DictConfig, name: str, formula: str, trajectories: int) -> None:
    """
    Args:
        name: of the policy.
        formula: of the number, in the names of the policy's keys.
        trajectories: that the policy grows for a prompt.

    Raises:
        ValueError: `rollout.n` is another number.
    """
    if (n := config.actor_rollout_ref.rollout.n) != trajectories:
        raise ValueError(
            f"{ROLLOUT}.n={n}: tree={name} grows {formula} = {trajectories} trajectories; set n to {trajectories}, or "
            f"other keys under {ROLLOUT}.custom.{name}"
        )


def check_log_probs(rollout, key: str, top_k: int) -> None:
    """Check that the rollout server reports what a policy reads: the `top_k` most likely tokens' log-probabilities.

    Args:
        rollout: `actor_rollout_ref.rollout`.
        key: of `top_k`.
        top_k: of these an entropy is estimated, or a branch is chosen.

    Raises:
        ValueError: the rollout server does not report so many, or reports logits.
    """
    if (mode := rollout.get("logprobs_mode", "processed_logprobs")) not in ("processed_logprobs", "raw_logprobs"):
        raise ValueError(
            f"{ROLLOUT}.logprobs_mode={mode}: expected processed_logprobs (entropies of what is sampled from) or "
            "raw_logprobs (at temperature 1)"
        )
    allowed = ((rollout.get("engine_kwargs") or {}).get("vllm") or {}).get("max_logprobs") or 20
    if 0 <= allowed < top_k:
        raise ValueError(
            f"{key}={top_k}: vLLM reports at most {allowed}; raise {ROLLOUT}.engine_kwargs.vllm.max_logprobs"
        )
