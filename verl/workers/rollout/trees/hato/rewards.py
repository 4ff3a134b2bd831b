"""R = alpha R_local + beta R_path + gamma R_causal of every node of a tree; all parts in [0, 1].

The verifier scores the WHOLE path to a leaf; it is right where its reward exceeds the threshold. For example, with
rewards of 1 and 0:

    problem ─┬─ 1 ─┬─ 2 right     R_path    1: 1     2: 1     3: 0     4: 0
             │     └─ 3 wrong     R_causal  1: 1/2 - 0 = 1/2    2: 1 - 0 = 1    3, 4: on no successful path, 0
             └─ 4 wrong

Decided here, as the notes do not say it:
- R_path is the reward itself, cut to [0, 1] so that the three parts have one scale: what a verifier gives for the form
  of a wrong answer counts, else nothing would keep a policy to the form where no answer is right.
- R_causal counts right and wrong alone. Its means are over leaves, each as often as it and the steps before it were
  drawn.
- A leaf without a verifier's reward and a pruned node tell nothing: they are in no mean, and are nobody's siblings.
  Their own R_path and R_causal are 0.
"""

import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from verl.workers.rollout.trees.hato.config import HEURISTIC, RewardWeights
from verl.workers.rollout.trees.hato.tree import LEAF, ROOT, ReasoningTree


class NodeRewards(NamedTuple):
    """The parts and their weighted sum; each a list over the tree's nodes, the root and pruned ones included."""

    local: list[float]
    path: list[float]
    causal: list[float]
    total: list[float]


class Outcomes(NamedTuple):
    """Leaves below each node: how many are right, how many the verifier has seen, their best and summed rewards.

    Each counts as often as the steps on the way to it from the node were drawn, the node itself once. Rewards are cut
    to [0, 1]; without a verified leaf both are 0.
    """

    right: list[int]
    verified: list[int]
    best: list[float]
    sum: list[float]


def leaf_outcomes(tree: ReasoningTree, threshold: float) -> Outcomes:
    """One pass from the last node to the first."""
    right, verified = [0] * len(tree.nodes), [0] * len(tree.nodes)
    best, total = [0.0] * len(tree.nodes), [0.0] * len(tree.nodes)
    for number in range(len(tree.nodes) - 1, -1, -1):
        node = tree.nodes[number]
        if node.status == LEAF and node.outcome is not None:
            verified[number] = 1
            right[number] = int(node.outcome > threshold)
            best[number] = total[number] = min(1.0, max(0.0, node.outcome))
        if node.parent is not None and tree.is_kept(number):
            right[node.parent] += node.count * right[number]
            verified[node.parent] += node.count * verified[number]
            total[node.parent] += node.count * total[number]
            best[node.parent] = max(best[node.parent], best[number])
    return Outcomes(right, verified, best, total)


def successful_leaves(tree: ReasoningTree, threshold: float) -> list[int]:
    """Leaves whose path is right, depth first."""
    outcome_of = {leaf: tree.nodes[leaf].outcome for leaf in tree.leaves()}
    return [leaf for leaf, outcome in outcome_of.items() if outcome is not None and outcome > threshold]


def causal_reward(right: int, verified: int, siblings_right: int, siblings_verified: int, path: float) -> float:
    """Share of right paths through a node minus that through its siblings, at least 0; without siblings R_path.

    0 where no path through the node is right.
    """
    if right == 0:
        return 0.0
    if siblings_verified == 0:
        return path
    return max(0.0, right / verified - siblings_right / siblings_verified)


def node_rewards(
    tree: ReasoningTree, weights: RewardWeights, threshold: float, path_reward: str = "best"
) -> NodeRewards:
    """R and its parts of every node, in time linear in the nodes.

    Args:
        tree: with `local_reward` of every node and `outcome` of the leaves.
        weights: alpha, beta, gamma.
        threshold: `hato.verification_threshold`.
        path_reward: R_path is the `best` reward of the leaves below a node, or their `mean`.
    """
    return rewards_of(tree, leaf_outcomes(tree, threshold), weights, path_reward)


def rewards_of(tree: ReasoningTree, outcomes: Outcomes, weights: RewardWeights, path_reward: str) -> NodeRewards:
    """`node_rewards` of a tree whose outcomes are known."""
    right, verified, best, summed = outcomes
    local = [node.local_reward for node in tree.nodes]
    if path_reward == "mean":
        path = [of_leaves / n if n else 0.0 for of_leaves, n in zip(summed, verified, strict=True)]
    else:
        path = best
    causal = []
    for number, node in enumerate(tree.nodes):
        if not tree.is_kept(number):
            causal.append(0.0)
        elif number == ROOT:
            causal.append(causal_reward(right[ROOT], verified[ROOT], 0, 0, path[ROOT]))
        else:
            others = (
                right[node.parent] - node.count * right[number],
                verified[node.parent] - node.count * verified[number],
            )
            causal.append(causal_reward(right[number], verified[number], *others, path[number]))
    total = [
        weights.alpha * of_step + weights.beta * of_path + weights.gamma * of_cause
        for of_step, of_path, of_cause in zip(local, path, causal, strict=True)
    ]
    return NodeRewards(local, path, causal, total)


# ---- R_local ----


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

    It gets a `Step` and returns a number in [0, 1] (what lies outside is cut); it may be a coroutine function, and has
    to be one where it waits for something, such as a process reward model behind HTTP.

    Raises:
        ValueError: there is no such function.
    """
    if name == HEURISTIC:
        return heuristic
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"hato.local_reward={name}: expected {HEURISTIC} or package.module.function ({error})"
        ) from error
    if not callable(found):
        raise ValueError(f"hato.local_reward={name}: expected a function, found {type(found).__name__}")
    return found


async def local_reward(function: LocalReward, step: Step) -> float:
    """The function's number, cut to [0, 1].

    Raises:
        ValueError: it is not finite.
    """
    found = function(step)
    value = float(await found if inspect.isawaitable(found) else found)
    if not math.isfinite(value):
        raise ValueError(f"hato.local_reward: {getattr(function, '__name__', function)} returned {value}")
    return min(1.0, max(0.0, value))
