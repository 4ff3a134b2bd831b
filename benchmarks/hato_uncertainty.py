"""Does uncertainty help HATO's search? Made trees whose nodes have known values, one budget.

    python benchmarks/hato_uncertainty.py [--seeds 8]

A node has a hidden logit, its parent's plus noise; a leaf is right with the probability sigmoid(logit), so a node's
value is known. Its features are noisy functions of the logit. A run is a stream of trees, in steps: in each step the
trees are searched by softmax((V + beta U) / temperature) over the nodes that could be expanded, until the budget of
nodes is spent; then the value model learns from the finished paths, as in training. Two problems:

    plain      all nodes look as they are
    deceptive  one branch in eight, and all below it, is much better than it looks, which one feature gives away

Baseline: `none`, a learnt value without uncertainty, at the same temperature. The temperature varies because U grows
with V where values are small, so that beta also sharpens the choice: a gain that a lower temperature gives as well is
not due to uncertainty. Trees, outcomes and the draws of the choices are the same for all within a seed. Writes
benchmarks/results/hato_uncertainty.md.
"""

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.report import write_report
from verl.workers.rollout.hato.calibration import reliability_table
from verl.workers.rollout.hato.value_model import make_value_model

DEPTH, BRANCHES, FEATURES = 4, 3, 6
NODES = sum(BRANCHES**depth for depth in range(1, DEPTH + 1))  # the root is no step
EXPANSIONS = 12  # a tree's budget: 36 of its 120 nodes, the root's children among them
TREES, STEPS = 16, 12
SIGMA = 1.0
TEMPERATURES = (0.1, 0.05, 0.02)
ARMS = [("none", 0.0), ("ensemble", 0.0), ("ensemble", 1.0), ("ensemble", 2.0)]
ARMS += [(kind, beta) for kind in ("dropout", "bootstrap") for beta in (0.0, 2.0)]


@dataclass
class Trees:
    """T whole trees, level by level: node i of a tree has the children 3 i + 3 ... 3 i + 5."""

    value: np.ndarray  # (T, NODES), the chance of a right answer below
    right: np.ndarray  # (T, NODES) 0 or 1, meant for leaves
    features: np.ndarray  # (T, NODES, FEATURES)


def depth_of_nodes() -> np.ndarray:
    return np.concatenate([np.full(BRANCHES**depth, depth) for depth in range(1, DEPTH + 1)])


def children(node: int) -> range:
    return range(BRANCHES * (node + 1), BRANCHES * (node + 2))


def make_trees(n: int, deceptive: bool, rng: np.random.Generator) -> Trees:
    depth = depth_of_nodes()
    logit = rng.normal(0, SIGMA, (n, NODES))
    logit[:, :BRANCHES] += rng.normal(-4.5, 1, (n, 1))
    unusual = (rng.random((n, NODES)) < 1 / 8) & deceptive
    for node in range(NODES):
        if depth[node] < DEPTH:
            logit[:, children(node)] += logit[:, [node]]
            unusual[:, children(node)] |= unusual[:, [node]]
    looks = logit - 2.0 * unusual
    logit = logit + 2.5 * unusual
    features = np.stack(
        [
            sigmoid(0.8 * looks + rng.normal(0, 1, looks.shape)),
            sigmoid(0.5 * looks + rng.normal(0, 1.5, looks.shape)),
            np.where(unusual, rng.uniform(0.6, 1, looks.shape), rng.uniform(0, 0.7, looks.shape)),
            np.broadcast_to(depth / DEPTH, looks.shape),
            rng.random(looks.shape),
            rng.random(looks.shape),
        ],
        axis=-1,
    )
    return Trees(value_of(logit, depth), rng.random(logit.shape) < sigmoid(logit), features)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def value_of(logit: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Mean of sigmoid(leaf's logit): the logit walks (DEPTH - depth) further steps; Gauss-Hermite quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(21)
    walked = SIGMA * np.sqrt(DEPTH - depth)[:, None] * points
    return sigmoid(logit[..., None] + walked) @ (weights / weights.sum())


def search(trees: Trees, score, temperature: float, rng: np.random.Generator) -> np.ndarray:
    """Which nodes were made (T, NODES); `score(features (N, F)) -> (N,)`."""
    n = len(trees.value)
    depth = depth_of_nodes()
    made = np.zeros((n, NODES), bool)
    scores = np.full((n, NODES), -np.inf)
    new = [(tree, node) for tree in range(n) for node in range(BRANCHES)]
    for _ in range(EXPANSIONS):
        rows, columns = np.array(new).T
        made[rows, columns] = True
        scores[rows, columns] = np.where(depth[columns] < DEPTH, score(trees.features[rows, columns]), -np.inf)
        weights = np.exp((scores - scores.max(1, keepdims=True)) / temperature)
        cumulated = weights.cumsum(1)
        chosen = (cumulated < rng.random((n, 1)) * cumulated[:, -1:]).sum(1)
        scores[np.arange(n), chosen] = -np.inf
        new = [(tree, child) for tree, node in enumerate(chosen) for child in children(node)]
    return made


def experience(trees: Trees, made: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features and mean outcome of the nodes on finished paths."""
    finished = np.where(made & (depth_of_nodes() == DEPTH), 1.0, 0.0)
    hits = finished * trees.right
    for node in reversed(range(NODES - BRANCHES**DEPTH)):
        finished[:, node] = finished[:, children(node)].sum(1)
        hits[:, node] = hits[:, children(node)].sum(1)
    seen = finished > 0
    return trees.features[seen], hits[seen] / finished[seen]


def run(kind: str, beta: float, temperature: float, deceptive: bool, seed: int) -> dict[str, float]:
    model = None if kind == "random" else make_value_model(kind, FEATURES, seed=seed)
    leaves = depth_of_nodes() == DEPTH
    solved, rightness, seconds = [], [], 0.0

    def score(features):
        if model is None:
            return np.zeros(len(features))
        value, uncertainty = model.predict(features)
        return (value + beta * uncertainty).numpy()

    for step in range(STEPS):
        trees = make_trees(TREES, deceptive, np.random.default_rng([seed, step]))
        start = time.process_time()
        made = search(trees, score, temperature, np.random.default_rng([seed, step, 1]))
        if model is not None:
            model.observe(*experience(trees, made))
        seconds += time.process_time() - start
        right = trees.right & made & leaves
        solved.append(right.any(1).mean())
        rightness.append(right.sum() / max(1, (made & leaves).sum()))
    figures = {"solved": np.mean(solved), "late": np.mean(solved[STEPS // 2 :]), "right": np.mean(rightness)}
    return figures | {"seconds": seconds / STEPS} | (quality(model, deceptive, seed) if model is not None else {})


def quality(model, deceptive: bool, seed: int) -> dict[str, float]:
    """Of the estimates, on all nodes of fresh trees: searched or not."""
    trees = make_trees(64, deceptive, np.random.default_rng([seed, 10**6]))
    value, uncertainty = (part.numpy() for part in model.predict(trees.features.reshape(-1, FEATURES)))
    known = trees.value.reshape(-1)
    error = np.abs(value - known)
    ranks = [np.argsort(np.argsort(part)) for part in (uncertainty, error)]
    return {
        "rmse": np.sqrt((error**2).mean()),
        "ece": reliability_table(value, known).ece,
        "informs": np.corrcoef(*ranks)[0, 1] if uncertainty.max() > 0 else np.nan,
    }


def row(arm: tuple, results: list[dict], baseline: list[dict] | None) -> list[str]:
    kind, beta, temperature = arm
    mean = {name: np.mean([result[name] for result in results]) for name in results[0]}
    cells = [f"{temperature:g}", kind, f"{beta:g}", f"{mean['solved']:.3f}", gain_over(baseline, results)]
    cells += [f"{mean['late']:.3f}", f"{mean['right']:.3f}"]
    cells += [f"{mean[name]:.3f}" if np.isfinite(mean.get(name, np.nan)) else "" for name in ("rmse", "ece", "informs")]
    return cells + [f"{1000 * mean['seconds']:.0f}"]


def gain_over(baseline: list[dict] | None, results: list[dict]) -> str:
    if baseline is None or baseline is results:
        return "baseline" if baseline else ""
    gain = np.array([a["solved"] - b["solved"] for a, b in zip(results, baseline, strict=True)])
    return f"{gain.mean():+.3f} ± {gain.std(ddof=1) / len(gain) ** 0.5:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    rows = []
    for problem in ("plain", "deceptive"):
        arms = [("random", 0.0, 1.0), *((*arm, temperature) for temperature in TEMPERATURES for arm in ARMS)]
        results = {arm: [run(*arm, problem == "deceptive", seed) for seed in seeds] for arm in arms}
        for arm, found in results.items():
            rows.append([problem, *row(arm, found, results.get(("none", 0.0, arm[2])))])
    write_report(
        "hato_uncertainty",
        f"Made search problems (see the script), {len(seeds)} seeds of {STEPS} steps of {TREES} trees, "
        f"{BRANCHES * EXPANSIONS} of {NODES} nodes made per tree. `solved`: share of the trees in which a right answer "
        "was found; `gain`: of `solved` over `none` at this temperature, paired by seed, ± its standard error; "
        "`late`: `solved` in the second half; `right`: share of the finished paths. Of the estimates after "
        "the last step, on all nodes of fresh trees: root mean square and calibration error against the known values, "
        "and the rank correlation of uncertainty and absolute error. CPU time per step is search and learning.",
        (
            "problem",
            "temperature",
            "kind",
            "beta",
            "solved",
            "gain",
            "late",
            "right",
            "RMSE",
            "ECE",
            "rank corr.",
            "ms / step",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
