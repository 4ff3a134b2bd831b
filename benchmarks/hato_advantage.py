"""What HATO's advantage reinforces besides right answers: made trees of the recipe's own search, so that it is known.

    python -m benchmarks.hato_advantage [--trees 4000]

Every step is as good as any other: a leaf is right with one chance, whatever is above it; V and R_local are noise. So
a mean advantage of the step that V likes most, among its siblings, is a bias, and weight on families of equal verified
rewards comes from R_local alone. Last, what V is good for: right leaves per tree where V is exact and where it is the
same everywhere, with leaves whose chances differ. Baseline: 0, and V the same everywhere. Writes
benchmarks/results/hato_advantage.md; no engine, one process.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from statistics import fmean, stdev

import torch

from benchmarks.report import write_report
from verl.trainer.ppo.hato_algos import TreeColumns, collate_steps, step_advantages
from verl.workers.rollout.hato.config import ExplorationConfig, RewardWeights, TreeConfig
from verl.workers.rollout.hato.rewards import node_rewards
from verl.workers.rollout.hato.search import Search
from verl.workers.rollout.hato.tree import LEAF, ROOT, ReasoningTree

N_LEAVES, DEPTH, CHANCE = 8, 4, 0.2
WEIGHTS = RewardWeights()


def made_tree(seed: int, tree_config: TreeConfig, exploration: ExplorationConfig, value: Callable, chance: Callable):
    """`value(logit, depth, rng)` is V of a step, `chance(logit)` that of a leaf; logits are a random walk from -2."""
    rng, tree = random.Random(seed), ReasoningTree([0], tree_config.max_nodes)
    logits = {ROOT: rng.gauss(-2, 1)}
    search = Search(tree, tree_config, exploration, n_leaves=N_LEAVES, seed=seed, temperature=1.0)
    while expansions := search.next():
        for one in expansions:
            for _ in range(one.children):
                depth, logit = tree.nodes[one.node].depth + 1, logits[one.node] + rng.gauss(0, 1)
                number = tree.add(
                    one.node,
                    [len(tree.nodes)],
                    [-1.0],
                    ended=one.to_the_end,
                    value=value(logit, depth, rng),
                    local_reward=min(1.0, max(0.0, rng.gauss(0.5, 0.1))),
                )
                logits[number] = logit
                if tree.nodes[number].status == LEAF:
                    tree.nodes[number].outcome = float(rng.random() < chance(logit))
    return tree


def noisy_trees(n: int, **tree_settings) -> Iterator[ReasoningTree]:
    config = TreeConfig(max_depth=DEPTH, **tree_settings)
    for seed in range(n):
        yield made_tree(seed, config, ExplorationConfig(), lambda logit, depth, rng: rng.random(), lambda logit: CHANCE)


def advantages_of(tree: ReasoningTree, rewards: list[float], norm: bool) -> torch.Tensor:
    columns = TreeColumns(tree.parents(), rewards, tree.trained_counts())
    return step_advantages(collate_steps([columns], []), norm_adv_by_std_in_grpo=norm).advantages


def bias(trees: Iterator[ReasoningTree], weights: RewardWeights, path_reward: str, norm: bool) -> tuple[float, float]:
    """Mean advantage of the step that V likes most among its siblings, and the mean's standard error."""
    found = []
    for tree in trees:
        advantages = advantages_of(tree, node_rewards(tree, weights, 0.5, path_reward).total, norm)
        for node in tree.nodes:
            if len(node.children) > 1:
                found.append(advantages[max(node.children, key=lambda child: tree.nodes[child].value)].item())
    return fmean(found), stdev(found) / math.sqrt(len(found))


def weight_of_local_reward(trees: Iterator[ReasoningTree]) -> float:
    """Share of sum |advantage| in families whose verified rewards are equal; the defaults otherwise."""
    flat = everything = 0.0
    for tree in trees:
        sizes = advantages_of(tree, node_rewards(tree, WEIGHTS, 0.5).total, True).abs()
        verified = node_rewards(tree, RewardWeights(alpha=0, beta=WEIGHTS.beta, gamma=WEIGHTS.gamma), 0.5).total
        without = advantages_of(tree, verified, True)
        everything += sizes.sum().item()
        flat += sizes[without == 0].sum().item()
    return flat / everything


def exact_value(logit: float, depth: int, rng: random.Random) -> float:
    """Mean of sigmoid(leaf's logit), of which the walk's remaining variance is known (probit approximation)."""
    return sigmoid(logit / math.sqrt(1 + math.pi / 8 * (DEPTH - depth)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def right_leaves(n: int, value: Callable, temperature: float, algorithm: str) -> tuple[float, float]:
    """Share of trees with a right leaf, and its standard error."""
    exploration = ExplorationConfig(selection_temperature=temperature)
    config = TreeConfig(max_depth=DEPTH, search_algorithm=algorithm)
    solved = [
        float(any(node.outcome for node in made_tree(seed, config, exploration, value, sigmoid).nodes))
        for seed in range(n)
    ]
    return fmean(solved), stdev(solved) / math.sqrt(n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=4000)
    n = parser.parse_args().trees
    rows = []
    no_causal = RewardWeights(alpha=0, beta=1, gamma=0)
    for label, settings, weights, path_reward, norm in (
        ("defaults", {}, WEIGHTS, "best", True),
        ("path_reward=mean", {}, WEIGHTS, "mean", True),
        ("adaptive_branching", {"adaptive_branching": True}, WEIGHTS, "best", True),
        ("adaptive_branching, path_reward=mean", {"adaptive_branching": True}, WEIGHTS, "mean", True),
        ("path_reward=mean, gamma=0, no std", {}, no_causal, "mean", False),
        ("adaptive_branching, the same", {"adaptive_branching": True}, no_causal, "mean", False),
    ):
        mean, error = bias(noisy_trees(n, **settings), weights, path_reward, norm)
        rows.append(("advantage of what V likes most", label, f"{mean:+.3f}", f"{error:.3f}"))
    weight = weight_of_local_reward(noisy_trees(n))
    rows.append(("weight that comes from R_local alone", "defaults", f"{weight:.2f}", ""))
    for algorithm in ("bfs", "beam", "dfs"):
        for temperature in (0.25, 0.02):
            for label, value in (("the same everywhere", lambda *_: 0.5), ("exact", exact_value)):
                mean, error = right_leaves(n, value, temperature, algorithm)
                where = f"{algorithm}, selection_temperature={temperature}, V {label}"
                rows.append(("trees with a right leaf", where, f"{mean:.3f}", f"{error:.3f}"))
    write_report(
        "hato_advantage",
        f"{n} trees of {N_LEAVES} leaves and depth {DEPTH}. First two measures: every leaf is right with probability "
        f"{CHANCE}, V is uniform in [0, 1], R_local normal (0.5, 0.1). Third: a leaf's logit is a random walk's.",
        ("measure", "setting", "mean", "standard error"),
        rows,
    )


if __name__ == "__main__":
    main()
