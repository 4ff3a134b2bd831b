"""The local reward R_local of a reasoning step, in [0, 1]: a heuristic over its tokens, or the user's own function.

R_path and R_causal are computed from the verifier's rewards in recipe/hato/credit.py.
"""

import inspect
import math
import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from recipe.hato.keys import HEURISTIC


@dataclass(frozen=True, kw_only=True)
class Step:
    """The input of a local reward, in token ids.

    Args:
        problem: the whole prompt.
        before: all earlier steps on the path; empty for the first step.
        parent: the preceding step; the problem for the first step.
        decode: function from token ids to text, for functions that need the text.
    """

    problem: Sequence[int]
    before: Sequence[int]
    parent: Sequence[int]
    tokens: Sequence[int]
    decode: Callable[[Sequence[int]], str] | None = None


LocalReward = Callable[[Step], float | Awaitable[float]]


def coherence(step: Step) -> float:
    """Return the share of the step's distinct tokens that the parent or the problem has: is it on the same subject?"""
    tokens = set(step.tokens)
    return len(tokens & ({*step.parent} | {*step.problem})) / len(tokens) if tokens else 0.0


def progress(step: Step) -> float:
    """Return the share of the step's distinct token pairs that neither the problem nor an earlier step has: is it new?
    For a step of one token, return 1 if that token is new, else 0."""
    if len(step.tokens) < 2:
        return float(bool(step.tokens) and step.tokens[0] not in {*step.problem, *step.before})
    pairs = set(pairwise(step.tokens))
    return len(pairs - set(pairwise([*step.problem, *step.before]))) / len(pairs)


def heuristic(step: Step) -> float:
    """Return the harmonic mean of coherence and progress: low for a step that repeats, and for one off the subject. It
    says nothing about whether a step is right; give it a small weight (`hato.reward_weights.alpha`)."""
    on_subject, new = coherence(step), progress(step)
    if on_subject + new == 0:
        return 0.0
    return 2 * on_subject * new / (on_subject + new)


def local_reward_function(name: str) -> LocalReward:
    """Return the function that `hato.local_reward` names, such as `my_package.rewards.step_reward`.

    It gets a `Step` and returns a number, which is cut to [0, 1]. It must be a coroutine function if it waits, for
    example for a process reward model behind HTTP.
    """
    if name == HEURISTIC:
        return heuristic
    try:
        reward = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"hato.local_reward={name}: expected {HEURISTIC} or package.module.function ({error})"
        ) from error
    if not callable(reward):
        raise ValueError(f"hato.local_reward={name}: expected a function, got {type(reward).__name__}")
    return reward


async def local_reward(function: LocalReward, step: Step) -> float:
    """Return the function's number, cut to [0, 1]; raise ValueError if it is not finite."""
    reward = function(step)
    value = float(await reward if inspect.isawaitable(reward) else reward)
    if not math.isfinite(value):
        raise ValueError(f"hato.local_reward: {getattr(function, '__name__', function)} returned {value}")
    return min(1.0, max(0.0, value))
