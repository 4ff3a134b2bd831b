"""HAPO's advantage and normalised entropy on a paper-sized batch, against a straightforward loop over groups and rows.

    python benchmarks/hapo_algos.py [--prompts 512] [--responses 16] [--tokens 4096] [--repeats 3]

Both compute the same values (checked). Memory is the peak above the input, as a multiple of the input, in a process
of its own. Writes benchmarks/results/hapo_algos.md.
"""

import argparse
import multiprocessing
import statistics
import threading
import time
from collections import defaultdict

import numpy as np
import psutil
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from benchmarks.report import write_report
from verl.trainer.ppo.hapo_algos import compute_entropy_h, compute_hapo_outcome_advantage


def make_batch(prompts: int, responses: int, tokens: int):
    """rewards, entropies, mask (B, T) and group names (B,); lengths uniform, half of the answers right."""
    generator = torch.Generator().manual_seed(0)
    rows = prompts * responses
    lengths = torch.randint(tokens // 8, tokens + 1, (rows,), generator=generator)
    mask = torch.arange(tokens) < lengths[:, None]
    rewards = torch.zeros(rows, tokens)
    rewards[torch.arange(rows), lengths - 1] = torch.randint(0, 2, (rows,), generator=generator).float()
    entropy = torch.rand(rows, tokens, generator=generator).pow_(6).mul_(4)
    return rewards, entropy, mask, np.repeat(np.arange(prompts), responses)


def looped_advantage(rewards, mask, index):
    """Row by row into a dictionary of groups and back, the way of verl's own estimators for groups."""
    values_of, rows_of = defaultdict(list), defaultdict(list)
    for row, group in enumerate(index):
        valid = mask[row].bool()
        values_of[group].append(rewards[row].sum().expand(int(valid.sum())))
        rows_of[group].append(row)
    grpo = compute_grpo_outcome_advantage(rewards.clone(), mask, index)[0]
    advantages = torch.zeros_like(rewards)
    for group, rows in rows_of.items():
        values = torch.cat(values_of[group])
        mean, std = values.mean(), values.std(unbiased=False)
        for row in rows:
            advantages[row] = (rewards[row].sum() - mean) / (std + 1e-6) * mask[row]
        if any((advantages[row].abs() >= 5).any() for row in rows):
            advantages[rows] = grpo[rows]
    return advantages


def looped_h(entropy, mask, pivot=0.8):
    """Statistics from the sorted values of the batch, h row by row."""
    x = entropy[mask].clamp(min=1e-6).log().sort().values
    median = x[round(pivot * (len(x) - 1))]
    std = (x - median).square().mean().sqrt()
    top, bottom = (x[-1] - median) / std, (x[0] - median) / std
    h = torch.zeros_like(entropy)
    for row in range(len(entropy)):
        for_row = (entropy[row][mask[row]].clamp(min=1e-6).log() - median) / std
        h[row][mask[row]] = torch.where(for_row > 0, for_row / top, for_row / bottom.abs())
    return h


def peak_above_input(sizes: tuple[int, int, int], what: str, answer) -> None:
    """Peak resident bytes above those before the call / bytes of the function's own input."""
    rewards, entropy, mask, index = make_batch(*sizes)
    process, done, peak = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if what == "advantage":
        compute_hapo_outcome_advantage(rewards, mask, index)
        own = rewards.nbytes + mask.nbytes
    else:
        compute_entropy_h(entropy, mask)
        own = entropy.nbytes + mask.nbytes
    done.set()
    watcher.join()
    answer.put((peak[0] - before) / own)


def measure_memory(sizes: tuple[int, int, int], what: str) -> float:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=peak_above_input, args=(sizes, what, answer))
    process.start()
    multiple = answer.get(timeout=600)
    process.join()
    return multiple


def seconds(function, *arguments) -> tuple[float, torch.Tensor]:
    started = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - started, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 512), ("responses", 16), ("tokens", 4096), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    sizes = (args.prompts, args.responses, args.tokens)
    rewards, entropy, mask, index = make_batch(*sizes)
    rows = []
    for what, ours, loop, inputs in (
        ("advantage", lambda *a: compute_hapo_outcome_advantage(*a)[0], looped_advantage, (rewards, mask, index)),
        ("entropy h", lambda *a: compute_entropy_h(*a)[0], looped_h, (entropy, mask)),
    ):
        pairs = [(seconds(ours, *inputs), seconds(loop, *inputs)) for _ in range(args.repeats)]
        torch.testing.assert_close(pairs[0][0][1], pairs[0][1][1], rtol=1e-3, atol=1e-4)
        fast, slow = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
        memory = measure_memory(sizes, what)
        rows.append((what, f"{slow:.2f} s", f"{fast:.2f} s", f"{slow / fast:.1f}", f"{memory:.2f}"))
    write_report(
        "hapo_algos",
        f"{args.prompts} prompts x {args.responses} responses x {args.tokens} tokens, median of {args.repeats}. Memory:"
        " peak above the input, as a multiple of the function's input.",
        ("", "loop over groups or rows", "ours", "times faster", "memory"),
        rows,
    )


if __name__ == "__main__":
    main()
