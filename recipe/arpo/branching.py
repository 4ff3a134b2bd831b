"""Probabilities to fork after a tool result, and the number of trajectories that start from the prompt: ARPO (arXiv
2507.19849), AEPO (2510.14545).

Entropies are means over the first `entropy_tokens` tokens after the prompt (`base`) or after a tool result (`now`),
over log |V|, so in [0, 1].

    >>> config = ARPOConfig(branch_probability=0.5, entropy_weight=0.2)
    >>> entropy(now=0.4, base=0.1, consecutive=0, config=config)
    0.56
"""

import math
from collections.abc import Callable

from recipe.arpo.keys import ARPOConfig


def entropy(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """Return ARPO's probability to fork: branch_probability + entropy_weight (now - base), cut to [0, 1]."""
    return min(1.0, max(0.0, config.branch_probability + config.entropy_weight * (now - base)))


def entropy_balanced(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """Return AEPO's probability: ARPO's times max(0, 1 - branch_penalty * consecutive).

    `consecutive` is the number of consecutive forks at the path's end.
    """
    return entropy(now, base, consecutive, config) * max(0.0, 1 - config.branch_penalty * consecutive)


def threshold(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """Return `branch_probability` if the entropy exceeds `entropy_weight` times the base, else 0."""
    return config.branch_probability if now > config.entropy_weight * base else 0.0


def never(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """Return 0: trajectories are independent."""
    return 0.0


BRANCH_POLICIES: dict[str, Callable[[float, float, int, ARPOConfig], float]] = {
    policy.__name__: policy for policy in (entropy, entropy_balanced, threshold, never)
}


def dynamic_initial_rollouts(n: int, h_root: float, h_tool: float, beta: float) -> int:
    """Return how many of n trajectories start from the prompt in AEPO: n sigmoid(beta (H_root - H_tool)), in [1, n].

    The number is rounded. The entropies are in nats: over log |V|, their difference would be too small to change it.
    """
    return max(1, min(n, round(n / (1 + math.exp(-beta * (h_root - h_tool))))))
