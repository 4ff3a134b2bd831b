"""When a trajectory forks after a tool result, and how many start from the prompt: ARPO (arXiv 2507.19849), AEPO
(2510.14545).

Entropies are means over the first `entropy_tokens` tokens after the prompt (`base`) or after a tool result (`now`),
over log |V|, so in [0, 1].

    >>> config = ARPOConfig(branch_probability=0.5, entropy_weight=0.2)
    >>> entropy(now=0.4, base=0.1, consecutive=0, config=config)
    0.56
"""

import math
from collections.abc import Callable

from verl.workers.rollout.trees.arpo.config import ARPOConfig


def entropy(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """ARPO: the probability to fork rises with the entropy that the tool's result brought."""
    return min(1.0, max(0.0, config.branch_probability + config.entropy_weight * (now - base)))


def entropy_balanced(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """AEPO: ARPO's, less by `branch_penalty` for each fork in a row on the path so far."""
    return entropy(now, base, consecutive, config) * max(0.0, 1 - config.branch_penalty * consecutive)


def threshold(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """A coin of `branch_probability`, where the entropy exceeds `entropy_weight` times the base."""
    return config.branch_probability if now > config.entropy_weight * base else 0.0


def never(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """Independent trajectories."""
    return 0.0


BRANCH_POLICIES: dict[str, Callable[[float, float, int, ARPOConfig], float]] = {
    policy.__name__: policy for policy in (entropy, entropy_balanced, threshold, never)
}


def dynamic_initial_rollouts(n: int, h_root: float, h_tool: float, beta: float) -> int:
    """AEPO's budget: how many of n trajectories start from the prompt, n sigmoid(beta (H_root - H_tool)) in [1, n].

    Entropies in nats: over log |V| their difference would not move any budget.
    """
    return max(1, min(n, round(n / (1 + math.exp(-beta * (h_root - h_tool))))))
