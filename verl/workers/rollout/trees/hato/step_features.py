"""A reasoning step as a short vector of numbers: those that the engine gives anyway, and its local reward.

This is all that the value model sees of a step. The engine's numbers do not say what a step means; a local reward can
(`hato.local_reward`, such as a process reward model), and V learns how much it is worth.

Every entry lies in [0, 1], by its own meaning and not by statistics of the data, so that a vector means the same in
every process and at every time of a run.

    >>> features = step_features(
    ...     log_probs=[-0.1, -2.3], entropies=[0.2, 0.4], path_log_probs=[-0.1, -2.3, 0.0],
    ...     max_tokens=8, depth=1, max_depth=4, siblings_agreement=0.5, budget_used=0.25, finished=False,
    ...     local_reward=0.8)
    >>> [round(feature, 2) for feature in features]
    [0.3, 0.1, 0.3, 0.25, 0.25, 0.45, 0.5, 0.25, 0.0, 0.8]
"""

import math
from collections.abc import Collection, Sequence

FEATURES = (
    "mean_probability",  # geometric mean over the step's tokens
    "min_probability",  # of its least likely token
    "mean_entropy",  # over the step's tokens, as a share of log |V|
    "length",  # share of the tokens a step may have
    "depth",  # share of the greatest depth
    "path_probability",  # geometric mean over all tokens from the root
    "sibling_agreement",  # see `agreement`
    "budget_used",  # share of the tree's budget spent when the step was made
    "finished",  # 1: the step holds an answer
    "local_reward",  # R_local
)


def step_features(
    *,
    log_probs: Sequence[float],
    entropies: Sequence[float],
    path_log_probs: Sequence[float],
    max_tokens: int,
    depth: int,
    max_depth: int,
    siblings_agreement: float,
    budget_used: float,
    finished: bool,
    local_reward: float,
) -> list[float]:
    """The features of one step, in the order of `FEATURES`.

    Args:
        log_probs: of the step's tokens, in nats; at least one.
        entropies: of their distributions, over log |V|; none where the engine reports none (the feature is then 0).
        path_log_probs: of all tokens from the root to the step's last.
        max_tokens, max_depth: what a step and a path may reach.
    """
    raw = (
        math.exp(sum(log_probs) / len(log_probs)),
        math.exp(min(log_probs)),
        sum(entropies) / len(entropies) if entropies else 0.0,
        len(log_probs) / max_tokens,
        depth / max_depth,
        math.exp(sum(path_log_probs) / len(path_log_probs)),
        siblings_agreement,
        budget_used,
        float(finished),
        local_reward,
    )
    return [min(1.0, max(0.0, value)) for value in raw]


def agreement(step: Collection[int], siblings: Sequence[Collection[int]]) -> float:
    """How much a step says what its siblings say: mean Jaccard similarity of the sets of token ids; 0 with none."""
    own = set(step)
    unions = [(own & set(sibling), own | set(sibling)) for sibling in siblings]
    return sum(len(both) / len(either) for both, either in unions if either) / len(unions) if unions else 0.0
