"""What a HATO step costs beside generation and the actor's update: search, rewards, batch and learning.

    VERL_PLATFORM=cpu python -m benchmarks.hato_driver [--trees 64] [--nodes 1000] [--step-seconds 60] [--runs 3]

Trees of about `--nodes` nodes grow on an engine that answers at once with random tokens, with 0.3 times as many leaves,
which are rows of the batch, as such a tree has with paths of 16 steps; three outcomes of ten are right. Then the
trainer's own methods do with them what they do in a step, but for transport by TransferQueue. All is CPU time of one
process with one thread; in training the rollout's side is spread over the agent loop's workers, while the engine
generates. The baseline is the same at an eighth of the nodes: time must be linear. Targets: under 2 % of a step, and a
tree's memory bounded by max_nodes.
Writes benchmarks/results/hato_driver.md; `--quick` only prints, sizes too small to mean anything.
"""

import argparse
import asyncio
import pickle
import random
import statistics
import time
import tracemalloc
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks.hato_rollout import learnt_model
from benchmarks.report import write_report
from recipe.hato.hato_trainer import HATOTrainer
from verl.trainer.ppo.hato_algos import compute_hato_advantage, family_metrics, given_steps, informative_mask
from verl.workers.rollout.hato.config import HATOConfig, TreeConfig
from verl.workers.rollout.hato.growth import Growth, TreeGrowth
from verl.workers.rollout.hato.messages import LEAF, TREE_STATE, pack
from verl.workers.rollout.hato.metrics import novelty, rdi, tree_metrics
from verl.workers.rollout.hato.rewards import heuristic
from verl.workers.rollout.rollout_engine import Generation

PROMPT, VOCABULARY, DEPTH = list(range(1000, 1100)), 150_000, 16
ENTROPY = 1.5  # nats
SHARES_OF_NODES, MAIN = (1 / 8, 1 / 4, 1 / 2, 1, 2), 3  # the sizes that are measured, and which is --nodes
ROLLOUT, DRIVER, ALONE, ENGINE = "rollout", "driver", "not in a sum", "engine"


class Clock(Counter):
    """(side, part) -> CPU seconds; `nodes`: how many were made."""

    nodes = 0

    def run(self, side: str, part: str, function, *arguments):
        started = time.process_time()
        result = function(*arguments)
        self[side, part] += time.process_time() - started
        return result


class Instant:
    """An engine whose answers take no time: what they cost is counted for itself."""

    def __init__(self, tokens: int, seed: int, clock: Clock):
        self.tokens, self.rng, self.clock = tokens, np.random.default_rng(seed), clock

    async def generate(self, prompt_ids, **options) -> Generation:
        return self.clock.run(ENGINE, "answers", self._answer)

    def _answer(self) -> Generation:
        tokens, log_probs = self.rng.integers(VOCABULARY, size=self.tokens), -self.rng.exponential(size=self.tokens)
        return Generation(tokens.tolist(), log_probs.tolist(), entropies=[ENTROPY] * self.tokens)


def leaves_of(nodes: int) -> int:
    return 3 * nodes // 10


def grow(nodes: int, trees: int, algorithm: str, tokens: int, clock: Clock) -> list[Growth]:
    leaves = leaves_of(nodes)
    bounds = {"max_depth": DEPTH, "max_nodes": nodes, "max_nodes_per_level": leaves, "max_step_tokens": tokens}
    config = HATOConfig(tree=TreeConfig(search_algorithm=algorithm, **bounds))
    model = learnt_model(config)
    model.predict = partial(clock.run, ROLLOUT, "V and U", model.predict)
    settings = {"room": tokens * DEPTH, "stop_token_ids": [], "vocab_size": VOCABULARY, "value_model": model}
    settings |= {"local_reward": heuristic}
    growing = [TreeGrowth(Instant(tokens, i, clock), PROMPT, leaves, config, seed=i, **settings) for i in range(trees)]
    for one in growing:
        one.search.next = partial(clock.run, ROLLOUT, "selection", one.search.next)

    async def together() -> list[Growth]:
        return await asyncio.gather(*(one.run() for one in growing))

    grown = clock.run(ROLLOUT, "features, R_local, tree", asyncio.run, together())
    for inside in ((ROLLOUT, "V and U"), (ROLLOUT, "selection"), (ENGINE, "answers")):
        clock[ROLLOUT, "features, R_local, tree"] -= clock[inside]
    clock.nodes = sum(len(growth.tree.nodes) - 1 for growth in grown)
    return grown


def sent(growth: Growth, n: int) -> tuple[list, bytes]:
    """The end of `HATORollout.run`: the rows, and what the trainer needs to know of the tree."""
    rows = growth.tree.rows(n)
    growth.tree.to_trajectory_tree([row.leaf for row in rows])
    tree_metrics(growth.tree)
    return rows, pickle.dumps({"structure": growth.tree.structure(), "features": growth.features})


def step(nodes: int, args) -> Clock:
    """One step, as `HATORollout.run` and `HATOTrainer._compute_advantage` do it."""
    clock = Clock()
    grown = grow(nodes, args.trees, "bfs", args.step_tokens, clock)
    arrived = [clock.run(ROLLOUT, "rows, structure, pickle", sent, growth, leaves_of(nodes)) for growth in grown]
    rng, fetched, right, masks = random.Random(0), {}, [], []
    for i, (rows, state) in enumerate(arrived):
        outcomes = {row.leaf: float(rng.random() < 0.3) for row in rows}
        fetched[str(i)] = {f"{i}_{j}_0": ({LEAF: row.leaf}, outcomes[row.leaf]) for j, row in enumerate(rows)}
        fetched[str(i)][f"{i}_0_0"][0][TREE_STATE] = clock.run(DRIVER, "unpickle", pickle.loads, state)
        right.append([row.token_ids for row in rows if outcomes[row.leaf]])
        masks += [torch.tensor(row.mask) for row in rows]
    drive(clock, nodes, fetched, torch.nested.as_nested_tensor(masks, layout=torch.jagged))
    clock.run(DRIVER, "RDI, novelty (8 trees)", lambda: [(rdi(one), novelty(one, one[:8])) for one in right[:8]])
    return clock


def drive(clock: Clock, nodes: int, fetched: dict[str, dict], nested_mask: torch.Tensor) -> None:
    """The methods of a trainer that has what they need, without Ray."""
    trainer = HATOTrainer.__new__(HATOTrainer)
    trainer.hato, trainer.dropped, trainer.record = HATOConfig(tree=TreeConfig(max_nodes=nodes)), [], {}
    config = {"algorithm": {}, "data": {"train_batch_size": len(fetched)}}
    trainer.config, trainer.global_steps, trainer.total_training_steps = OmegaConf.create(config), 1, 100
    trainer.value_model, trainer.problem_of = learnt_model(trainer.hato), {uid: f"problem {uid}" for uid in fetched}
    keys = [key for rows in fetched.values() for key in rows]
    batch, mask = SimpleNamespace(keys=keys, tags=[{}] * len(keys)), nested_mask.to_padded_tensor(0)
    trees = [clock.run(DRIVER, "tree, R of its nodes", trainer._searched_tree, *rows) for rows in fetched.items()]
    trainer.searched = {tree.uid: tree for tree in trees}
    steps = clock.run(DRIVER, "batch", trainer._steps, batch, trees, nested_mask)
    clock.run(DRIVER, "advantages", trainer._advantages_of, trees, steps)
    with given_steps(steps):
        clock.run(DRIVER, "advantages", compute_hato_advantage, mask, mask)
    clock.run(DRIVER, "advantages", informative_mask, steps, mask)
    clock.run(DRIVER, "metrics", family_metrics, steps, mask)
    clock.run(DRIVER, "metrics", trainer._metrics_of, trees, trees)
    clock.run(DRIVER, "value model learns", trainer._learn, trees)
    clock.run(DRIVER, "value model packed", lambda: pack(trainer.value_model.state_dict()))
    clock.run(ALONE, "share_nodes", trainer._shared_nodes, list(trainer.problem_of.values()))


def other_searches(nodes: int, args) -> Clock:
    """Seconds of an eighth of the trees, scaled to all."""
    found, trees = Clock(), max(1, args.trees // 8)
    for algorithm in ("dfs", "beam"):
        clock = Clock()
        grow(nodes, trees, algorithm, args.step_tokens, clock)
        for part in ("selection", "V and U"):
            found[ALONE, f"{part}, {algorithm}"] = clock[ROLLOUT, part] * args.trees / trees
    return found


def memory(nodes: int, algorithm: str, args) -> str:
    """A line of the table: a tree's peak while it grows."""
    tracemalloc.start()
    tree = grow(nodes, 1, algorithm, args.step_tokens, Clock())[0].tree
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    made, held = sum(node.n_tokens for node in tree.nodes), sum(len(node.token_ids) for node in tree.nodes)
    counts = f"{algorithm} | {nodes} | {len(tree.nodes) - 1} | {tree.n_kept} | {made} | {held}"
    return f"| {counts} | {peak / 2**20:.2f} | {peak / 2**10 / nodes:.2f} |"


def rows_of(clocks: dict[int, list[Clock]], step_seconds: float) -> list[tuple[str, ...]]:
    parts = [part for part in next(iter(clocks.values()))[0] if part[0] != ENGINE]
    lines = {f"{side}: {part}": [(side, part)] for side, part in parts}
    lines["**driver, sum**"] = [part for part in parts if part[0] == DRIVER]
    lines["**with selection, V and U**"] = [*lines["**driver, sum**"], (ROLLOUT, "selection"), (ROLLOUT, "V and U")]
    lines["**rollout, sum**"] = [part for part in parts if part[0] == ROLLOUT]
    nodes, rows = [of_size[0].nodes for of_size in clocks.values()], []
    for name, summed in lines.items():
        times = [statistics.median(sum(clock[p] for p in summed) for clock in found) for found in clocks.values()]
        linear, each = times[MAIN] / times[0] * nodes[0] / nodes[MAIN], 1e6 * times[MAIN] / nodes[MAIN]
        cells = *(f"{seconds:.3f}" for seconds in times), f"{linear:.2f}", f"{each:.1f}"
        rows.append((name, *cells, f"{times[MAIN] / step_seconds:.2%}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("trees", 64), ("nodes", 1000), ("step-tokens", 32), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--step-seconds", type=float, default=60, help="of a training step on GPUs, which is assumed")
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds: 4 small trees, 1 run, no file")
    args = parser.parse_args()
    if args.quick:
        args.trees, args.nodes, args.runs = 4, 128, 1
    if args.nodes < 64:
        parser.error(f"--nodes {args.nodes}: an eighth of it has to have two leaves, so at least 64")
    torch.set_num_threads(1)
    sizes = [int(share * args.nodes) for share in SHARES_OF_NODES]
    step(sizes[0], args)  # warms up
    clocks = {size: [] for size in sizes}
    for run in range(args.runs):
        for size in sizes:
            clocks[size].append(step(size, args))
            clocks[size][-1].update(other_searches(size, args))
            print(f"run {run}: {clocks[size][-1].nodes} nodes, {clocks[size][-1].total():.1f} s", flush=True)
    header = ("", *(f"{size} nodes, s" for size in sizes), "time / nodes", "us / node", "of a step")
    rows = rows_of(clocks, args.step_seconds)
    text = [
        f"{args.trees} trees, steps of {args.step_tokens} tokens, medians of {args.runs} runs. Columns: max_nodes of a "
        "tree, all of which bfs makes, and CPU seconds for all trees. `time / nodes`: how much more time "
        f"{args.nodes} nodes take than {sizes[0]} (baseline), over how many more they are: 1 is linear, less has a "
        f"constant part. `us / node`, `of a step`: at {args.nodes} nodes; a step of {args.step_seconds:g} s is "
        "assumed; target: under 2 %. Not in a sum: other searches instead of bfs (measured on an eighth of the trees), "
        "and `share_nodes`, which is off by default.",
        "",
        "Peak memory of one tree while it grows; `KiB` over max_nodes must not grow:",
        "",
        "| search | max_nodes | made | kept | tokens made | tokens held | peak, MiB | KiB / max_nodes |",
        "| --- " * 8 + "|",
        *(memory(size, algorithm, args) for algorithm in ("bfs", "beam") for size in sizes),
    ]
    if args.quick:
        print(*text, *(" | ".join(cells) for cells in (header, *rows)), sep="\n")
    else:
        write_report("hato_driver", "\n".join(text), header, rows)


if __name__ == "__main__":
    main()
