"""Rows against their prefix tree: time of the log-prob pass and of the update, and the update's peak memory.

    python -m benchmarks.prefix_tree [--runs 5]                    # CPU
    python -m benchmarks.prefix_tree --device cuda --runs 10       # a machine with a GPU

Needs torch and transformers only. The model is a Qwen2 with random weights. The trajectories of a group have equal
lengths and fork off each other at random, so that the rows have `sharing` times as many tokens as their tree. Rows are
computed as upstream does: on CPU as a padded batch with `sdpa`, on a GPU packed, with the tree's varlen kernel. Both
sides alternate in the same run. Prints a page in Markdown and writes no file.
"""

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.report import in_turns, parser_of, report_text, with_range
from verl.workers.engine.prefix_tree.attention import NAME
from verl.workers.engine.prefix_tree.log_probs import TrieBatch
from verl.workers.rollout.contexts import sequences_of_row

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def qwen2(*sizes: int, vocab_size: int) -> Qwen2Config:
    """Return the config of a Qwen2 with the sizes hidden, intermediate, layers, attention heads and key-value heads."""
    sizes_by_name = dict(zip(SIZES, sizes, strict=True))
    return Qwen2Config(**sizes_by_name, vocab_size=vocab_size, tie_word_embeddings=True, attn_implementation="sdpa")


class Group(NamedTuple):
    """Trajectories of equal length; the rows have `sharing` times as many tokens as their tree."""

    rows: int
    length: int
    sharing: float


MODELS = {
    "cpu": {"6 layers of 384": qwen2(384, 1024, 6, 6, 2, vocab_size=16_384)},
    "cuda": {
        "0.5 B": qwen2(896, 4_864, 24, 14, 2, vocab_size=151_936),
        "1.5 B": qwen2(1_536, 8_960, 28, 12, 2, vocab_size=151_936),
    },
}
GROUPS = {
    "cpu": [Group(16, length, sharing) for length in (64, 256) for sharing in (1.0, 1.5, 2.5, 4.0, 8.0)],
    "cuda": [Group(16, 1_536, sharing) for sharing in (1.0, 1.5, 2.5, 4.0)],
}
MEMORY_SHARING = (1.0, 2.5, 4.0)


def sequences_of(group: Group, vocabulary: int) -> list[np.ndarray]:
    """Return the group's token rows (length,); each row but the first takes its first tokens from an earlier row."""
    rng = np.random.default_rng(0)
    shared = (1 - (group.rows / group.sharing - 1) / (group.rows - 1)) * group.length
    jitter = min(shared, group.length - shared) / 2
    rows = [rng.integers(vocabulary, size=group.length)]
    for _ in range(1, group.rows):
        fork = round(shared + rng.uniform(-jitter, jitter))
        fresh = rng.integers(vocabulary, size=group.length - fork)
        rows.append(np.concatenate([rows[rng.integers(len(rows))][:fork], fresh]))
    return rows


def make_model(config: Qwen2Config, device: str) -> Qwen2ForCausalLM:
    """Return a model with seeded random weights: in float32 on a CPU, in bfloat16 on a GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(torch.float32 if device == "cpu" else torch.bfloat16).train()


def timed(run: Callable, device: torch.device) -> tuple[float, float]:
    """Return the seconds of one run, and the peak MiB that it added to the memory in use (on a CPU: NaN)."""
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started, math.nan
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started, (torch.cuda.max_memory_allocated() - before) / 2**20


class Side:
    """One way to compute a group's log-probabilities: `rows` or `tree`."""

    def __init__(self, name: str, model: Qwen2ForCausalLM, rows: list[np.ndarray], checkpointing: bool = False):
        self.name, self.model, self.rows = name, model, rows
        self.packed = name == "tree" or model.device.type != "cpu"
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def log_probs(self) -> torch.Tensor:
        """Return the log-probabilities (tokens,) of every row's tokens from the second one on."""
        self.model.set_attn_implementation(NAME if self.packed else "sdpa")
        if not self.packed:
            ids = torch.from_numpy(np.stack(self.rows))
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
            return -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        # Packed rows are one trie per row: only rows with equal temperatures share nodes.
        kinds = [1.0] * len(self.rows) if self.name == "tree" else [1 + 1e-6 * row for row in range(len(self.rows))]
        batch = TrieBatch([sequences_of_row(row) for row in self.rows], kinds, self.model.device)
        logits = self.model(**batch.model_inputs, use_cache=False).logits[0]
        values = batch.node_log_probs(logits)[batch.next_nodes]
        return values.view(len(self.rows), -1)[:, :-1].flatten()

    def log_prob_pass(self, _run: int = 0) -> float:
        """Return the seconds of the pass that computes old log-probabilities."""
        with torch.no_grad():
            return timed(self.log_probs, self.model.device)[0]

    def update(self, _run: int = 0) -> float:
        """Return the seconds of a policy-gradient loss's forward and backward pass."""

        def forward_and_backward():
            values = self.log_probs()
            advantages = torch.linspace(-1, 1, len(values), device=values.device)
            (advantages * values).mean().backward()

        seconds = timed(forward_and_backward, self.model.device)[0]
        self.model.zero_grad()
        return seconds


def compare(model: Qwen2ForCausalLM, group: Group, runs: int) -> dict[str, dict[str, list[float]]]:
    """Return pass -> side -> seconds of each run, without a first run of each, which warms up."""
    rows = sequences_of(group, model.config.vocab_size)
    sides = {name: Side(name, model, rows) for name in ("rows", "tree")}
    times = {}
    for what in ("log_prob_pass", "update"):
        results = in_turns({name: getattr(side, what) for name, side in sides.items()}, runs + 1)
        times[what] = {name: seconds[1:] for name, seconds in results.items()}
    return times


def peak_text(name: str, config: Qwen2Config, group: Group, checkpointing: bool, device: str) -> str:
    """Return the MiB by which an update's peak memory exceeds the model and its gradients; `name` is the `Side`. It
    measures this process, which should be a fresh one: on a CPU, memory freed earlier would hide a part of the peak."""
    model = make_model(config, device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    side = Side(name, model, sequences_of(group, config.vocab_size), checkpointing)
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _peak_kib()
        side.update()
        return f"{(_peak_kib() - before) / 2**10:,.0f}"
    try:
        return f"{timed(side.update, model.device)[1]:,.0f}"
    except torch.OutOfMemoryError:
        return "out of memory"


def _peak_kib() -> int:
    """Return the largest resident memory of this process since the last reset, in KiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def ratio_of(times: dict[str, list[float]]) -> float:
    """Return the median time of rows divided by that of the tree."""
    return statistics.median(times["rows"]) / statistics.median(times["tree"])


def main() -> None:
    parser = parser_of(__doc__, device="cpu", runs=5, only="")
    parser.add_argument("--sharing", type=float, nargs="+", help="these, of the longest groups, without peak memory")
    args = parser.parse_args()
    groups, fresh_process, table = GROUPS[args.device], multiprocessing.get_context("spawn"), []
    longest = max(group.length for group in groups)
    if args.sharing:
        groups = [Group(groups[0].rows, longest, sharing) for sharing in args.sharing]
    measured = [g for g in groups if not args.sharing and g.length == longest and g.sharing in MEMORY_SHARING]
    for model_name, config in MODELS[args.device].items():
        if not model_name.startswith(args.only):
            continue
        model = make_model(config, args.device)
        for group in groups:
            cells = [model_name, f"{group.rows} x {group.length}", f"{group.sharing:g}"]
            try:
                for times in compare(model, group, args.runs).values():
                    cells += [with_range(times[name], ".3f") for name in ("rows", "tree")]
                    cells.append(f"{ratio_of(times):.2f}")
            except torch.OutOfMemoryError:
                model.zero_grad()
                cells += ["out of memory"] * (9 - len(cells))
            for checkpointing in (False, True):
                peaks = []
                for name in ("rows", "tree") if group in measured else ():
                    with fresh_process.Pool(1) as pool:
                        peaks.append(pool.apply(peak_text, (name, config, group, checkpointing, args.device)))
                cells.append(" / ".join(peaks))
            table.append(cells)
            print(*cells, sep=" | ", flush=True)
        del model
    what = (
        f"Seconds, median of {args.runs} runs (least to most); ratios are those of the medians. Peak memory of the "
        "update above the model's and its gradients', in MiB, rows / tree, each in a process of its own. "
        f"{'float32' if args.device == 'cpu' else 'bfloat16'}, vocabulary {config.vocab_size:,}."
    )
    header = ["model", "rows x tokens", "sharing"]
    for name in ("log-probs", "update"):
        header += [f"{name}: rows", "tree", "ratio"]
    print(report_text(f"prefix_tree_{args.device}", what, [*header, "MiB", "MiB with checkpointing"], table))


if __name__ == "__main__":
    main()
