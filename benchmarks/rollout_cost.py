"""Compares the cost of each policy's trees with ordinary samples of equally many tokens, on the same vLLM engine.

    VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.rollout_cost [--prompts 16] [--n 8] [--tokens 256]

One vLLM engine in float32 has a small random model, scaled to be as unsure as a trained one; it never ends an answer.
In each run the trees of all prompts grow at once. Right after them the same prompts are sampled: equally many tokens as
the engine generated for the trees, dropped ones included, in answers of `--tokens`. CPU is the CPU time of this process
and the engine's. The small model's text differs from a trained model's, so the requests for LATR's trees at the paper's
settings are also counted on a made-up engine, `Scripted`.
Writes benchmarks/results/rollout_cost.md.
"""

import asyncio
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.report import in_turns, parser_of, table_lines, with_range, write_report
from recipe.arpo.keys import ARPOConfig
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from recipe.compared.eptree.tree import EPTreeKeys
from recipe.compared.tree_grpo.tree import TreeGRPOKeys
from recipe.hato.keys import HATOConfig
from recipe.hato.local_reward import heuristic
from recipe.hato.value_model import value_model_of
from recipe.latr.keys import KTConfig
from verl.workers.config.keys import read_keys
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine
from verl.workers.rollout.engines.local_vllm import VLLMEngine
from verl.workers.rollout.tree_builder import BranchPolicy, grow, policy_class
from verl.workers.rollout.tree_rollout import GroupEngine


def policies(text_of, decode, tokens: int) -> dict[str, BranchPolicy]:
    """Return every policy by name, with settings under which its trees branch.

    Args:
        text_of: function from a token id to its text.
        decode: function from a list of token ids to their text.
        tokens: largest number of tokens of an answer.
    """
    latr = {"prob_filter_abs_thres": 0.1, "prob_filter_rel_thres": 0.4, "keep_math_symbols": False}
    settings = {
        "plain": (),
        "latr": (KTConfig(**latr), text_of),
        "arpo": (ARPOConfig(initial_rollouts=4, max_turn_tokens=32, turn_delimiter="."), decode),
        "over_generation": (2.0,),
        "eptree": (EPTreeKeys(M=2, N=3, L=1, T=1),),
        "tree_grpo": (TreeGRPOKeys(M=2, N=3, L=1, step_delimiter="."), text_of),
    }
    for search, depth in (("bfs", 8), ("bfs", 4), ("beam", 8), ("dfs", 8)):
        bounds = {"search_algorithm": search, "max_depth": depth, "max_step_tokens": tokens // depth}
        hato = read_keys(HATOConfig, {"tree": bounds}, "hato")
        settings[f"hato {search}, {depth} steps"] = (hato, value_model_of(hato, 0), heuristic, decode)
    return {name: policy_class(name.split()[0])(*arguments) for name, arguments in settings.items()}


def write_peaked_model(folder: Path, config: TinyModelConfig) -> None:
    """Write a random model with scaled-up logits: it is as unsure as a trained one, and not nearly uniform."""
    write_tiny_model(folder, config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(8)
    model.save_pretrained(folder)


def start_engine(model: Path, vocab_size: int) -> VLLMEngine:
    """Return an engine in float32 in a process of its own, as `hardware=cpu` makes it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # otherwise the engine starts another process and waits for it
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "PASSIVE"}
    options = {"enforce_eager": True, "distributed_executor_backend": "uni", "gpu_memory_utilization": 0.3, "seed": 0}
    # Prefixes are cached in whole blocks; 32 is the smallest block on CPU, where the default is 128 (on GPUs 16).
    engine = VLLMEngine.start(model, vocab_size, dtype="float32", block_size=32, **options)
    torch.set_num_threads(1)  # this process grows the trees, and Ray's workers have one thread
    return engine


class Scripted(RolloutEngine):
    """A made-up engine, where one next token has probability 0.9, or two tokens have 0.45 and 0.35.

    Args:
        unsure: share of the positions with two likely tokens.
        shared: share of the positions whose tokens depend on the position alone; the others also depend on the three
            tokens before. Branches that differ in a word may thus come to the same text again.
        length: approximate number of tokens of an answer.
    """

    END = 0

    def __init__(self, unsure: float, shared: float, length: int):
        self.unsure, self.shared, self.length = unsure, shared, length
        self.generated, self.requests = 0, 0

    def choices(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """Return the two most likely next tokens with log-probabilities; `tokens[0]`, the prompt, is a random seed."""
        place = random.Random(f"{tokens[0]} {len(tokens)}")
        after = random.Random(f"{tokens[0]} {len(tokens)} {tokens[-3:]}")
        draw = place if place.random() < self.shared else after
        first, second = draw.sample(range(1, 1000), 2)
        if len(tokens) > 0.7 * self.length and draw.random() < 3 / self.length:
            first = self.END
        likely = (0.45, 0.35) if draw.random() < self.unsure else (0.9, 0.05)
        return list(zip((first, second), map(math.log, likely), strict=True))

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests += 1
        result, draw = Generation([], [], []), random.Random(request.seed)
        while len(result.token_ids) < request.max_tokens and not result.stopped:
            choices = self.choices([*request.prompt_ids, *result.token_ids])
            first_taken = not request.temperature or draw.random() < math.exp(choices[0][1])
            token, log_prob = choices[0 if first_taken else 1]
            result.top_logprobs.append(choices)
            result.token_ids.append(token)
            result.log_probs.append(log_prob)
            result.stopped = token == self.END
        self.generated += len(result.token_ids)
        return result


SCRIPTS = [(unsure, shared, length) for length in (250, 800) for unsure in (0.02, 0.05, 0.2) for shared in (0.0, 0.6)]


def counted(n_prompts: int = 8, n: int = 8) -> str:
    """Return a table of the requests and tokens of LATR's trees at the paper's thresholds."""
    header = ["answers of about", "two likely tokens", "shared text", "requests a tree", "tokens generated", "used"]
    policy, rows = policy_class("latr")(KTConfig(keep_math_symbols=False)), []
    for unsure, shared, length in SCRIPTS:
        engine = Scripted(unsure, shared, length)
        options = {"max_tokens": 1024, "stop_token_ids": [engine.END]}
        trees = [asyncio.run(grow(engine, [1000 + i], n, policy, seed=i, **options)) for i in range(n_prompts)]
        requests, generated, used = (x / n_prompts for x in (engine.requests, engine.generated, unique_tokens(trees)))
        text = [str(length), f"{unsure:.0%}", f"{shared:.0%}"]
        rows.append([*text, f"{requests:.0f}", f"{generated:,.0f}", f"{used:,.0f}"])
    return "\n".join(table_lines(header, rows))


def unique_tokens(trees) -> int:
    """Return the number of tokens of the trajectories, where a shared token counts once."""
    used = [{i for leaf in tree.leaves for i in tree.path(leaf)} for tree in trees]
    return sum(len(tree.segments[i].token_ids) for tree, ids in zip(trees, used, strict=True) for i in ids)


class Cost(NamedTuple):
    """Seconds, CPU seconds of this process and the engine's, number of requests and of generated tokens."""

    seconds: float
    cpu: float
    requests: int
    generated: int


class Setting:
    """The model, prompts and engine of the measurements."""

    def __init__(self, folder: Path, n_prompts: int, n: int, tokens: int):
        write_peaked_model(folder, TinyModelConfig(seed=1, max_length=1024))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        draw = random.Random(0)
        self.prompts = [[draw.randrange(200) for _ in range(draw.randint(16, 48))] for _ in range(n_prompts)]
        self.n, self.tokens, self.engine = n, tokens, start_engine(folder, len(tokenizer))
        self.options = {"max_tokens": tokens, "stop_token_ids": [], "vocab_size": len(tokenizer)}
        self.policies = policies(lambda token: tokenizer.decode([token]), tokenizer.decode, tokens)
        this = psutil.Process()
        self.processes = [this, *this.children(recursive=True)]

    async def run(self, name: str, number: int) -> dict[str, float]:
        """Return the cost of a policy's trees, the samples' time, and the tokens of the trajectories.

        `held` is the number of all tokens of the trajectories, and `unique` counts a shared token once.
        """
        seeds = [1000 * number + i for i in range(len(self.prompts))]
        budgets = []

        async def grown(prompt, seed):
            engine = GroupEngine(self.engine)
            tree = await grow(engine, prompt, self.n, self.policies[name], seed=seed, **self.options)
            budgets.append((prompt, engine.tokens))
            return tree

        trees, cost = await self.cost_of([grown(*each) for each in zip(self.prompts, seeds, strict=True)])
        lengths = [(prompt, min(self.tokens, left)) for prompt, all in budgets for left in range(all, 0, -self.tokens)]
        requests = [
            GenerationRequest(prompt, max_tokens=length, stop_token_ids=[], seed=seed)
            for seed, (prompt, length) in enumerate(lengths)
        ]
        _, samples = await self.cost_of([self.engine.generate(request) for request in requests])
        held = sum(len(row) for tree in trees for row in tree.trajectories())
        times = {"sample_seconds": samples.seconds, "sample_cpu": samples.cpu}
        return cost._asdict() | times | {"unique": unique_tokens(trees), "held": held}

    async def cost_of(self, coroutines) -> tuple[list, Cost]:
        await self.engine.forget_prefixes()
        before = self._now()
        results = await asyncio.gather(*coroutines)
        return results, Cost(*(after - was for after, was in zip(self._now(), before, strict=True)))

    def _now(self) -> Cost:
        times = [process.cpu_times() for process in self.processes]
        cpu = sum(each.user + each.system for each in times)
        return Cost(time.perf_counter(), cpu, self.engine.requests, self.engine.generated)


def row_of(name: str, runs: pd.DataFrame, n_prompts: int) -> list[str]:
    """Return the table's row of a policy; `runs` has a row of `Setting.run` for each run."""
    mean, share = runs.mean(), (runs["unique"] / runs["held"]).mean()
    against = [f"{with_range(runs[what] / runs[f'sample_{what}'], '.2f')} x" for what in ("seconds", "cpu")]
    numbers = [f"{mean['requests'] / n_prompts:.1f}", f"{mean['generated']:,.0f}", f"{mean['held']:,.0f}"]
    return [name, with_range(runs["seconds"], ".1f"), *against, *numbers, f"{share:.2f}"]


def main() -> None:
    args = parser_of(__doc__, prompts=16, n=8, tokens=256, runs=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), args.prompts, args.n, args.tokens)
        loop = asyncio.new_event_loop()

        def measure(name: str, run: int) -> dict[str, float]:
            return loop.run_until_complete(setting.run(name, run))

        sides = {name: partial(measure, name) for name in setting.policies}
        in_turns(sides, 1)  # warm up
        results = in_turns(sides, args.runs)
        setting.engine.shutdown()
    header = ["tree", "seconds", "against samples", "CPU against samples", "requests a tree", "tokens generated"]
    header += ["tokens of the trajectories", "unique share"]
    rows = [row_of(name, pd.DataFrame(runs), args.prompts) for name, runs in results.items()]
    what = (
        f"{args.prompts} prompts, n = {args.n}, {args.tokens} tokens; median of {args.runs} runs (range)."
        f"\n\nLATR at the paper's thresholds, on made-up texts of at most 1,024 tokens:\n\n{counted()}\n"
    )
    write_report("rollout_cost", what, header, rows)


if __name__ == "__main__":
    main()
