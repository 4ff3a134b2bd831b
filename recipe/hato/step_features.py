"""The features of a reasoning step: a short vector of numbers from the engine, and the step's local reward.

They are the value model's only input. The engine's numbers do not reflect what a step means; a local reward can
(`hato.local_reward`, such as a process reward model), and the value model learns how much weight it deserves.

Every feature lies in [0, 1] by its definition, without statistics of the data, so that a vector means the same in every
process and at every time of a run.

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
    "min_probability",  # probability of the least likely token
    "mean_entropy",  # over the step's tokens, as a share of log |V|
    "length",  # share of the tokens a step may have
    "depth",  # share of the greatest depth
    "path_probability",  # geometric mean over all tokens from the root
    "sibling_agreement",  # see `agreement`
    "budget_used",  # share of the tree's budget spent when the step was made
    "finished",  # 1 if the step ends the response, else 0
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
    """Return the ten features of one step, in the order of `FEATURES`, whose comments define them.

    Args:
        log_probs: log-probabilities of the step's tokens, in nats; at least one.
        entropies: entropies of their distributions, over log |V|; empty if the engine reports none (the feature is 0).
        path_log_probs: log-probabilities of all tokens from the root to the step's last.
        max_tokens, max_depth: largest number of tokens of a step, and of steps of a path.
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
    """Return the mean Jaccard similarity of a step's set of token ids with each sibling's; 0 without siblings."""
    own = set(step)
    unions = [(own & set(sibling), own | set(sibling)) for sibling in siblings]
    return sum(len(both) / len(either) for both, either in unions if either) / len(unions) if unions else 0.0
