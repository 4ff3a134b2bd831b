"""What lookahead trees cost: against plain sampling on the same vLLM engine, and against padded lockstep decoding.

    VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.latr_rollout [--prompts 16] [--n 8] [--tokens 256]

One vLLM engine in float32, a small random model made to be unsure. `kt` grows trees as in training (then samples the
rest); `plain` samples n responses; both give as many responses of at most as many tokens. `lockstep` grows the same
trees the padded way on `transformers`: all branches of all prompts in one batch, a step at a time, until the slowest is
done; its trees are checked to be the same. Memory is the peak of resident bytes, the engine's process included.
Writes benchmarks/results/latr_rollout.md and .png.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.report import RESULTS, write_report
from benchmarks.vllm_engine import VLLM
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from verl.workers.rollout.kt import KTConfig
from verl.workers.rollout.kt.growth import Sampling, TreeGrower, latr_group
from verl.workers.rollout.kt.lookahead import Choice, LookaheadTree

CONFIG = KTConfig(prob_filter_abs_thres=0.1, prob_filter_rel_thres=0.4, keep_math_symbols=False)
MODEL = TinyModelConfig(seed=1, max_length=1024)


class Setting:
    """Model, tokenizer, prompts and engine of one benchmark run."""

    def __init__(self, folder: Path):
        write_tiny_model(folder, MODEL)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            self.model.model.norm.weight.mul_(8)  # an untrained model is nearly uniform and would never branch
        self.model.save_pretrained(folder)
        self.engine = VLLM.start(folder)

    def prompts(self, n: int, seed: int) -> list[list[int]]:
        generator = random.Random(seed)
        return [[generator.randrange(200) for _ in range(generator.randint(16, 48))] for _ in range(n)]

    async def trees(self, prompts, n, tokens, config=CONFIG):
        """(seconds, trees)."""
        started = time.perf_counter()
        eos = [self.tokenizer.eos_token_id]
        groups = [
            latr_group(
                self.engine, p, n, config, max_new_tokens=tokens, eos_token_ids=eos, text_of=self.text_of, seed=i
            )
            for i, p in enumerate(prompts)
        ]
        return await asyncio.gather(*groups), time.perf_counter() - started

    async def plain(self, prompts, n, tokens):
        started = time.perf_counter()
        eos = [self.tokenizer.eos_token_id]
        requests = [
            self.engine.generate(p, max_tokens=tokens, stop_token_ids=eos, temperature=1.0, seed=n * i + j)
            for i, p in enumerate(prompts)
            for j in range(n)
        ]
        return await asyncio.gather(*requests), time.perf_counter() - started

    async def grown(self, prompts, n, tokens, config):
        """Trees without ordinary sampling after them, for the comparison with lockstep."""
        started = time.perf_counter()
        trees = [self.empty_tree(n, tokens, config) for _ in prompts]
        growers = [TreeGrower(self.engine, p, tree, Sampling(), 0) for p, tree in zip(prompts, trees, strict=True)]
        await asyncio.gather(*(grower.grow() for grower in growers))
        return trees, time.perf_counter() - started

    def empty_tree(self, n, tokens, config) -> LookaheadTree:
        return LookaheadTree(n, config, tokens, [self.tokenizer.eos_token_id], self.text_of)

    def text_of(self, token: int) -> str:
        return self.tokenizer.decode([token])


@torch.inference_mode()
def lockstep(setting: Setting, prompts, n, tokens, config) -> tuple[list[LookaheadTree], float]:
    """All branches of all prompts in one padded batch, a forward pass per step; finished branches keep their place."""
    started = time.perf_counter()
    trees = [setting.empty_tree(n, tokens, config) for _ in prompts]
    width = max(map(len, prompts))
    pad = setting.tokenizer.pad_token_id
    inputs = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    rows = [(tree, 0) for tree in trees]  # the batch: (tree, number of the row)
    cache = None
    while not all(tree.left for tree in trees):
        positions = (mask.cumsum(-1) - 1)[:, -inputs.shape[1] :].clamp(min=0)
        output = setting.model(
            inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
        log_probs, best = output.logits[:, -1].float().log_softmax(-1).topk(config.max_n_branch_per_token)
        at = {(id(tree), number): i for i, (tree, number) in enumerate(rows)}
        rows, sources, last = [], [], []
        for tree in trees:
            if not tree.left:
                choices = [
                    None if row.finished else Choice(list(zip(best[i].tolist(), log_probs[i].tolist(), strict=True)))
                    for row in tree.rows
                    for i in [at[id(tree), row.number]]
                ]
                tree.advance(choices)
            for row in tree.rows:
                born_now = (id(tree), row.number) not in at
                rows.append((tree, row.number))
                sources.append(at[id(tree), row.parent if born_now else row.number])
                last.append(row.tokens[-1])
        order = torch.tensor(sources)
        cache.reorder_cache(order)
        mask = torch.cat([mask[order], torch.ones(len(order), 1, dtype=mask.dtype)], dim=1)
        inputs = torch.tensor(last)[:, None]
    return trees, time.perf_counter() - started


class PeakMemory:
    """Peak resident bytes of this process and its children while the block runs."""

    def __enter__(self):
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _watch(self):
        me = psutil.Process()
        while not self._done.wait(0.1):
            self.peak = max(self.peak, sum(p.memory_info().rss for p in [me, *me.children(recursive=True)]))


def unique_tokens(trees) -> int:
    """Tokens of the returned trajectories, shared ones once."""
    return sum(
        len(tree.segments[i].token_ids) for tree in trees for i in {i for leaf in tree.leaves for i in tree.path(leaf)}
    )


async def against_plain(setting: Setting, args) -> list[tuple[str, ...]]:
    measured = {"plain": [], "kt": []}
    for repeat in range(args.repeats + 1):  # the first one warms up
        prompts = setting.prompts(args.prompts, seed=repeat)
        for name in measured:
            await setting.engine.engine.reset_prefix_cache()
            setting.engine.generated = setting.engine.cached = setting.engine.prompted = 0
            with PeakMemory() as memory:
                found, seconds = await (setting.plain if name == "plain" else setting.trees)(
                    prompts, args.n, args.tokens
                )
            trained_on = sum(len(t) for tree in found for t in tree.trajectories()) if name == "kt" else None
            useful = unique_tokens(found) if name == "kt" else setting.engine.generated
            engine = setting.engine
            measured[name].append(
                (seconds, engine.generated, useful, trained_on or useful, engine.cached, engine.prompted, memory.peak)
            )
    rows, base = [], None
    for name, runs in measured.items():
        seconds, generated, useful, trained_on, cached, prompted, memory = (
            statistics.median(column) for column in zip(*runs[1:], strict=True)
        )
        base = base or (seconds, memory)
        rows.append(
            (name, f"{seconds:.2f}", f"{seconds / base[0]:.2f}", f"{generated:.0f}", f"{useful:.0f}")
            + (f"{generated - useful:.0f}", f"{trained_on:.0f}", f"{cached:.0f} of {prompted:.0f}")
            + (f"{memory / 2**30:.2f} ({memory / base[1]:.2f})",)
        )
    return rows


async def against_lockstep(setting: Setting, args) -> tuple[float, float, int, int]:
    """Median seconds of ours and of lockstep; trees that are the same, and all."""
    config = replace(CONFIG, return_on_full=False, force_return_step=-1)
    ours, theirs, same, total = [], [], 0, 0
    for repeat in range(args.repeats):
        prompts = setting.prompts(args.prompts, seed=100 + repeat)
        await setting.engine.engine.reset_prefix_cache()
        trees, seconds = await setting.grown(prompts, args.n, args.tokens, config)
        expected, slow = lockstep(setting, prompts, args.n, args.tokens, config)
        ours.append(seconds)
        theirs.append(slow)
        total += len(trees)
        same += sum(
            [r.tokens for r in a.rows] == [r.tokens for r in b.rows] for a, b in zip(trees, expected, strict=True)
        )
    return statistics.median(ours), statistics.median(theirs), same, total


async def growth(setting: Setting, args) -> dict[str, list[tuple[int, float, float]]]:
    """What is varied -> (value, seconds of plain, seconds of kt), a quarter of the tokens."""
    tokens = args.tokens // 4
    points = {"n": (4, 8, 16, 32, 64), "prompts": (1, 4, 16, 64), "chunk_size": (1, 4, 8, 16, 32, 64)}
    found = {}
    for name, values in points.items():
        found[name] = []
        for value in values:
            n, prompts, chunk = (8, 8, 16)
            n, prompts = (value, prompts) if name == "n" else (n, value if name == "prompts" else prompts)
            config = replace(CONFIG, chunk_size=value if name == "chunk_size" else chunk)
            asked = setting.prompts(prompts, seed=value)
            await setting.engine.engine.reset_prefix_cache()
            _, plain = await setting.plain(asked, n, tokens)
            await setting.engine.engine.reset_prefix_cache()
            _, kt = await setting.trees(asked, n, tokens, config)
            found[name].append((value, plain, kt))
    return found


def draw(found: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    for ax, (name, points) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        values, plain, kt = zip(*points, strict=True)
        ax.plot(values, plain, marker="o", label="plain sampling")
        ax.plot(values, kt, marker="s", label="kt")
        ax.set(xscale="log", yscale="log", xlabel=name, ylabel="seconds", xticks=values, xticklabels=values)
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
    figure.savefig(path, dpi=120)


async def run(args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder) / "model")
        rows = await against_plain(setting, args)
        ours, theirs, same, total = await against_lockstep(setting, args)
        found = await growth(setting, args)
        setting.engine.engine.shutdown()
    draw(found, RESULTS / "latr_rollout.png")
    varied = [
        f"| {name} = {value} | {plain:.2f} | {kt:.2f} | {kt / plain:.2f} |"
        for name, points in found.items()
        for value, plain, kt in points
    ]
    text = [
        f"{args.prompts} prompts x {args.n} responses x at most {args.tokens} tokens, median of {args.repeats} "
        "alternating repeats after one to warm up. `generated`: by the engine; `useful`: in the returned trees, shared "
        "tokens once; "
        "`trained on`: in the responses; `prefix-cached`: of the prompt tokens that requests brought.",
        "",
        f"Growing the trees alone, to the end: {ours:.2f} s; padded lockstep on `transformers`: {theirs:.2f} s, "
        f"{theirs / ours:.1f} times as long; {same} of {total} trees are the same token by token.",
        "",
        f"8 prompts x 8 responses x {args.tokens // 4} tokens, chunk_size 16, one of them varied, one run each "
        "(`latr_rollout.png`):",
        "",
        "| varied | plain, s | kt, s | ratio |",
        "| --- | --- | --- | --- |",
        *varied,
        "",
    ]
    header = (
        "",
        "seconds",
        "ratio",
        "generated",
        "useful",
        "wasted",
        "trained on",
        "prefix-cached",
        "peak GiB (ratio)",
    )
    write_report("latr_rollout", "\n".join(text), header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 16), ("n", 8), ("tokens", 256), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
