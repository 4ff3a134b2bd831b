"""R_local of a reasoning step, in [0, 1]: a heuristic over its tokens, or a function of one's own.

R_path and R_causal follow from the verifier's rewards, see verl/trainer/ppo/credit/hato.py.
"""

import inspect
import math
import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from verl.workers.rollout.trees.hato.config import HEURISTIC


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a local reward looks at; all are token ids.

    Args:
        problem: of the whole prompt.
        before: of the steps before this one; empty for the first.
        parent: of the step right before; the problem for the first step.
        tokens: of the step.
        decode: token ids to text, for functions that read it.
    """

    problem: Sequence[int]
    before: Sequence[int]
    parent: Sequence[int]
    tokens: Sequence[int]
    decode: Callable[[Sequence[int]], str] | None = None


LocalReward = Callable[[Step], float | Awaitable[float]]


def coherence(step: Step) -> float:
    """Share of the step's different tokens that the parent or the problem has: does it speak of the same things?"""
    tokens = set(step.tokens)
    return len(tokens & ({*step.parent} | {*step.problem})) / len(tokens) if tokens else 0.0


def progress(step: Step) -> float:
    """Share of the step's different token pairs that neither the problem nor an earlier step has: does it say
    something new? Of a step of one token, its share of new tokens."""
    if len(step.tokens) < 2:
        return float(bool(step.tokens) and step.tokens[0] not in {*step.problem, *step.before})
    pairs = set(pairwise(step.tokens))
    return len(pairs - set(pairwise([*step.problem, *step.before]))) / len(pairs)


def heuristic(step: Step) -> float:
    """Harmonic mean of coherence and progress: a step that repeats gets as little as one that speaks of other things.

    It knows nothing about what is right; weigh it lightly (`hato.reward_weights.alpha`).
    """
    speaks_of_it, says_something = coherence(step), progress(step)
    if speaks_of_it + says_something == 0:
        return 0.0
    return 2 * speaks_of_it * says_something / (speaks_of_it + says_something)


def local_reward_function(name: str) -> LocalReward:
    """The function that `hato.local_reward` names, such as `my_package.rewards.step_reward`.

    It gets a `Step` and returns a number in [0, 1] (what lies outside is cut); it has to be a coroutine function where
    it waits for something, such as a process reward model behind HTTP. Raises ValueError where there is no function.
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
    """The function's number, cut to [0, 1].

    Raises:
        ValueError: it is not finite.
    """
    reward = function(step)
    value = float(await reward if inspect.isawaitable(reward) else reward)
    if not math.isfinite(value):
        raise ValueError(f"hato.local_reward: {getattr(function, '__name__', function)} returned {value}")
    return min(1.0, max(0.0, value))
