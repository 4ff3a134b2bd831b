"""Times what one thread of the driver does in a step beside upstream's code, with each credit and loss, on CPU.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.driver_step --base /tmp/before [--runs 5]

Both sides run in processes of their own, with their own code, and take turns part by part. A step runs without Ray, on
rows in memory: the queue's time and upstream's own are left out. A group has 16 trajectories, which fork at random, of
3/4 to all of the tokens. The exponent is the slope of log seconds over log trajectories. Writes
benchmarks/results/driver_step.md.
"""

import gc
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np

N = 16
ACTOR = "actor_rollout_ref.actor"
GROWTH = (256, 1024, 4096, 8192)


class Stopwatch:
    """Adds up the seconds in which it is on."""

    def __init__(self):
        self.total, self.on, self.since = 0.0, False, time.perf_counter()

    def switch(self, on: bool) -> bool:
        now, before = time.perf_counter(), self.on
        self.total += (now - self.since) * before
        self.since, self.on = now, on
        return before

    def during(self, function, on: bool):
        """Return the function, during which the watch is on or off."""

        def call(*args, **kwargs):
            before = self.switch(on)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)

        return call


def random_tree(draw, width: int):
    from verl.workers.rollout.trajectory_tree import TOOL, Segment, TrajectoryTree

    tree = TrajectoryTree(draw.integers(0, 50_000, 200).tolist())
    for row in range(N):
        path = tree.path(tree.leaves[draw.integers(row)])[: draw.integers(0, 3 * width // 2 // 282) * 2] if row else []
        left = draw.integers(width * 3 // 4, width) - sum(len(tree.segments[i].token_ids) for i in path)
        at = path[-1] if path else None
        while left > 0 or at is None:  # turns of 250 tokens, and answers of 32
            tokens = draw.integers(0, 50_000, 250).tolist()
            at = tree.add_chain(at, [Segment(None, tokens, draw.random(250).tolist())])
            at = tree.add_chain(at, [Segment(None, tokens[:32], author=TOOL)])
            left -= 282
        tree.leaves.append(at)
    return tree.renumbered()


def parts_of_step(size: int, width: int) -> dict:
    """Return a function for each part of a step, which runs it and returns its seconds."""
    import pytest
    import torch
    import transfer_queue
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from tests.trainer.ppo.toy_step import MemoryQueue, trainer_of
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.batch_rows import BatchRows
    from verl.trainer.ppo.v1.tree_reports import diversity_metrics
    from verl.utils.parts import parts
    from verl.workers.rollout.rows import queue_rows, reward_batch
    from verl.workers.rollout.tree_rollout import rows_of

    torch.set_num_threads(1)
    draw, queue = np.random.default_rng(0), MemoryQueue(pytest.MonkeyPatch())
    for kind in ("tree", "component", "loss"):
        parts(kind)
    for prompt in range(size // N):
        tree = random_tree(draw, width)
        columns = zip(tree.trajectories(), tree.response_masks(), tree.log_probs(), tree.segment_ids(), strict=True)
        for row, (tokens, mask, log_probs, ids) in enumerate(columns):
            ends = [not this or after or draw.random() < 0.5 for this, after in zip(mask, [*mask[1:], 1], strict=True)]
            fields = {"entropy": draw.gamma(0.5, 0.5, len(ids)).astype(np.float32).tolist(), "draws": [1] * len(ids)}
            fields |= {"local_rewards": (np.array(ids) % 7 / 7).tolist(), "dropped": [0] * len(ids)}
            fields |= {"answer_gains": np.where(ends, np.nan, 0.1).tolist(), "deep_grpo_pivot": [row % 3] * len(ids)}
            extra = {"reward_extra_info": {"acc": float(row % 2), "pred": str(row % 4)}}
            columns = {"responses": tokens, "rollout_log_probs": log_probs, "segment_ids": ids, "extra_fields": extra}
            queue.add(f"{prompt:05}_{row}_0", row % 2, mask, prompt, **columns, **fields)
    watch = Stopwatch()
    for name in ("kv_batch_get", "kv_batch_put"):
        setattr(transfer_queue, name, watch.during(getattr(transfer_queue, name), on=False))
    PPOTrainerSync._compute_advantage = watch.during(PPOTrainerSync._compute_advantage, on=False)
    # an estimator is called within upstream's method, and counts
    estimate = trainer_base.compute_advantage_for_multi_trajectories
    trainer_base.compute_advantage_for_multi_trajectories = watch.during(estimate, on=True)
    PPOTrainerSync._compute_old_log_prob = lambda self, batch, metrics: batch

    def timed(values: dict, run):
        def call() -> float:
            trainer = trainer_of({"trainer.tree_prompts": 0, "actor_rollout_ref.rollout.n": N} | values)
            watch.total = 0.0
            watch.during(run, on=True)(trainer, queue.batch())
            return watch.total

        return call

    def place(trainer, batch):
        batch.reorder(BatchRows(batch).in_data_order)
        trainer._groups_together(BatchRows(batch), 8, 2)

    def diversity(trainer, batch):
        rows = BatchRows(batch)
        diversity_metrics(rows, rows.groups[:8])

    def group_rows(trainer, batch):
        outputs = rows_of(tree, SimpleNamespace(fields=()))
        reward_batch(outputs, {"uid": "p"})
        queue_rows(outputs, {"uid": "p", "global_steps": 1})

    steps = {"rows of a group (agent worker)": timed({}, group_rows), "placement": timed({}, place)}
    steps["diversity"] = timed({}, diversity)
    for name, part in parts("credit").items():
        values = {"algorithm.adv_estimator": name} | part.values
        if not part.alias:
            steps[f"credit {name}"] = timed(values, lambda trainer, batch: trainer._compute_advantage(batch, {}))
    for name, part in parts("loss").items():
        keys = {} if part.keys is None else asdict(part.keys()) | part.values
        values = {f"{ACTOR}.{key.removeprefix(f'{ACTOR}.')}": value for key, value in keys.items()}
        values[f"{ACTOR}.policy_loss.loss_mode"] = name
        if not part.alias and trainer_of(values).computed_fields:
            steps[f"fields {name}"] = timed(values, lambda trainer, batch: trainer._compute_old_log_prob(batch, {}))
    gc.collect()
    gc.freeze()  # the collector would look at the trees of this script
    return steps


def serve(size: int, width: int) -> None:
    """Print the parts' names, and then the seconds of each part that is asked for."""
    steps = parts_of_step(size, width)
    print("|".join(steps), flush=True)
    for line in sys.stdin:
        print(steps[line.strip()](), flush=True)


class Side:
    """A process with the code of a folder."""

    def __init__(self, folder: Path, size: int, width: int):
        command = [sys.executable, __file__, "--serve", str(size), str(width)]
        env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
        self.parts = self._read().split("|")

    def _read(self) -> str:
        while line := self.process.stdout.readline():
            if not line.startswith(("WARNING", "INFO")):
                return line.strip()
        raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")

    def seconds(self, part: str) -> float:
        print(part, file=self.process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    from benchmarks.report import in_turns, parser_of, with_range, write_report

    args = parser_of(__doc__, base="", runs=5, trajectories=1024, tokens=4096, growth_tokens=512).parse_args()
    here, rows, medians = Path(__file__).resolve().parents[1], [], {}
    sides = {name: Side(Path(path), args.trajectories, args.tokens) for name, path in (("b", args.base), ("n", here))}
    for part in sides["n"].parts:
        ask = {name: lambda _, side=side: side.seconds(part) for name, side in sides.items()}  # noqa: B023
        seconds = in_turns(ask, args.runs + 1)
        before, now = (seconds[name][1:] for name in ("b", "n"))  # the first run warms up
        medians[part] = statistics.median(before), statistics.median(now)
        ratio = f"{medians[part][1] / medians[part][0]:.2f}"
        rows.append([part, with_range(before, ".3f"), with_range(now, ".3f"), ratio])
        print(rows[-1], file=sys.stderr)
    for side in sides.values():
        side.close()
    for step in (["placement", "diversity", "credit grpo"], ["placement", "diversity", "credit grpo", "fields archer"]):
        before, now = (sum(medians[part][i] for part in step) for i in (0, 1))
        rows.append([f"**sum: {', '.join(step)}**", f"{before:.3f}", f"{now:.3f}", f"{now / before:.2f}"])
    curves: dict[str, list[float]] = {}
    for size in GROWTH:
        side = Side(here, size, args.growth_tokens)
        for part in side.parts:
            curves.setdefault(part, []).append(min(side.seconds(part) for _ in range(2)))
        side.close()
        print(size, {part: f"{curve[-1]:.3f}" for part, curve in curves.items()}, file=sys.stderr)
    for row in rows:
        curve = curves.get(row[0])
        row.append(f"{np.polyfit(np.log(GROWTH), np.log(curve), 1)[0]:.2f}" if curve else "")
    what = (
        f"Seconds, median of {args.runs} (least to most), of {args.trajectories:,} trajectories of up to "
        f"{args.tokens:,} tokens. The exponent is of the code of now, from {GROWTH[0]} to {GROWTH[-1]:,} trajectories "
        f"of {args.growth_tokens} tokens. Diversity, of 8 prompts, and rows of a group do not depend on the number of "
        "trajectories. The queue, and upstream's own computations, equal on both sides, are left out."
    )
    write_report("driver_step", what, ["part", "before", "now", "now / before", "exponent"], rows)


if __name__ == "__main__":
    serve(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["--serve"] else main()
