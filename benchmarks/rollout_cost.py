"""What a tree of each policy costs against as many ordinary samples, on the same vLLM engine.

    VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.rollout_cost [--prompts 16] [--n 8] [--tokens 128]

One vLLM engine in float32 with a small random model, made to be unsure as a trained one is. All policies grow trees of
the same prompts in the same run, in turns. Unique tokens are those of the trees' trajectories, a shared one once.
Writes benchmarks/results/rollout_cost.md.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.report import in_turns, parser_of, with_range, write_report
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from verl.workers.rollout.entropy import entropies_of
from verl.workers.rollout.growth import BranchPolicy, grow, policy_class
from verl.workers.rollout.rollout_engine import Generation
from verl.workers.rollout.trees.arpo.config import ARPOConfig
from verl.workers.rollout.trees.eptree import EPTreeKeys
from verl.workers.rollout.trees.hato.config import HATOConfig
from verl.workers.rollout.trees.hato.local_reward import heuristic
from verl.workers.rollout.trees.hato.value_model import value_model_of
from verl.workers.rollout.trees.latr.config import KTConfig
from verl.workers.rollout.trees.tree_grpo import TreeGRPOKeys
from vllm_patches.candidates_without_text import leave_out_text


def policies(text_of, decode) -> dict[str, BranchPolicy]:
    """Every policy, with settings under which its trees branch."""
    hato = HATOConfig.from_dict({"tree": {"max_step_tokens": 32, "step_delimiter": "."}})
    settings = {
        "plain": (),
        "latr": (KTConfig(prob_filter_abs_thres=0.1, prob_filter_rel_thres=0.4, keep_math_symbols=False), text_of),
        "arpo": (ARPOConfig(initial_rollouts=4, max_turn_tokens=32, turn_delimiter="."), decode),
        "hato": (hato, value_model_of(hato, 0), heuristic, decode),
        "over_generation": (2.0,),
        "eptree": (EPTreeKeys(M=2, N=3, L=1, T=1),),
        "tree_grpo": (TreeGRPOKeys(M=2, N=3, L=1, step_delimiter="."), text_of),
    }
    return {name: policy_class(name)(*arguments) for name, arguments in settings.items()}


class VLLM:
    """vLLM's asynchronous engine as a `RolloutEngine`; counts the tokens that it generates."""

    def __init__(self, engine, vocab_size: int):
        self.engine, self.vocab_size = engine, vocab_size
        self.generated, self.requests = 0, 0

    @classmethod
    def start(cls, model: str | Path) -> "VLLM":
        """An engine in float32 in a process of its own."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        leave_out_text()
        # prefixes are cached in whole blocks: the smallest on CPU, where the default is 128 (on GPUs 16)
        arguments = AsyncEngineArgs(
            str(model),
            dtype="float32",
            enforce_eager=True,
            gpu_memory_utilization=0.3,
            block_size=32,
            seed=0,
            disable_log_stats=True,
        )
        return cls(AsyncLLM.from_engine_args(arguments), len(AutoTokenizer.from_pretrained(model)))

    async def generate(
        self,
        prompt_ids,
        *,
        max_tokens,
        stop_token_ids,
        n_candidates=0,
        n_entropy=0,
        stop=(),
        request_id=None,
        **sampling,
    ):
        from vllm import SamplingParams

        from verl.workers.rollout.candidate_server import ranked, top_log_probs

        self.requests += 1
        n = max(n_candidates, n_entropy)
        # as the rollout server does: see verl/workers/rollout/candidate_server.py
        params = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
            stop=list(stop),
            skip_special_tokens=False,
            logprobs=n,
            flat_logprobs=True,
            detokenize=bool(stop) or not n,
            **sampling,
        )
        last = None
        prompt = {"prompt_token_ids": list(prompt_ids)}
        async for part in self.engine.generate(prompt, params, request_id=f"request-{self.requests}"):
            last = part
        output = last.outputs[0]
        tokens = list(output.token_ids)
        self.generated += len(tokens)
        flat = output.logprobs
        chosen = [flat.logprobs[at] for at in flat.start_indices]
        generation = Generation(tokens, chosen, stopped=tokens[-1] in stop_token_ids)
        if n_candidates:
            generation.candidates = ranked(flat, n_candidates)
        if n_entropy:
            generation.entropies = entropies_of(top_log_probs(flat, n)[:, :n_entropy], self.vocab_size).tolist()
        return generation


class Setting:
    """Model, prompts and engine of a run."""

    def __init__(self, folder: Path, n_prompts: int, n: int, tokens: int):
        write_tiny_model(folder, TinyModelConfig(seed=1, max_length=1024))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            model.model.norm.weight.mul_(8)  # an untrained model is nearly uniform
        model.save_pretrained(folder)
        draw = random.Random(0)
        self.prompts = [[draw.randrange(200) for _ in range(draw.randint(16, 48))] for _ in range(n_prompts)]
        self.n, self.engine = n, VLLM.start(folder)
        self.options = {"max_tokens": tokens, "stop_token_ids": [tokenizer.eos_token_id], "vocab_size": len(tokenizer)}
        self.policies = policies(lambda token: tokenizer.decode([token]), tokenizer.decode)

    async def grow(self, name: str, run: int) -> tuple[float, int, int, int]:
        """Seconds, tokens generated, unique tokens and all tokens of the trajectories."""
        before, started = self.engine.generated, time.perf_counter()
        growing = [
            grow(self.engine, prompt, self.n, self.policies[name], seed=1000 * run + i, **self.options)
            for i, prompt in enumerate(self.prompts)
        ]
        trees = await asyncio.gather(*growing)
        seconds = time.perf_counter() - started
        used = [{i for leaf in tree.leaves for i in tree.path(leaf)} for tree in trees]
        unique = sum(len(tree.segments[i].token_ids) for tree, of in zip(trees, used, strict=True) for i in of)
        return seconds, self.engine.generated - before, unique, sum(len(row) for t in trees for row in t.trajectories())


def row_of(name: str, runs: Sequence[tuple], plain: Sequence[tuple]) -> list[str]:
    seconds, generated, unique, held = ([run[i] for run in runs] for i in range(4))
    ratios = [mine / of_plain[0] for mine, of_plain in zip(seconds, plain, strict=True)]
    shares = [x / y for x, y in zip(unique, held, strict=True)]
    return [
        name,
        with_range(seconds, ".1f"),
        f"{with_range(ratios, '.2f')} x",
        f"{statistics.mean(generated):,.0f}",
        f"{statistics.mean(held):,.0f}",
        f"{statistics.mean(shares):.2f}",
    ]


def main() -> None:
    args = parser_of(__doc__, prompts=16, n=8, tokens=128, runs=3).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), args.prompts, args.n, args.tokens)
        loop = asyncio.new_event_loop()
        sides = {
            name: lambda run, name=name: loop.run_until_complete(setting.grow(name, run)) for name in setting.policies
        }
        in_turns(sides, 1)  # warm up
        results = in_turns(sides, args.runs)
        setting.engine.engine.shutdown()
    header = ["tree", "seconds", "against plain", "tokens generated", "tokens of the trajectories", "unique share"]
    what = f"{args.prompts} prompts, n = {args.n}, at most {args.tokens} tokens; median of {args.runs} runs (range)."
    write_report("rollout_cost", what, header, [row_of(name, runs, results["plain"]) for name, runs in results.items()])


if __name__ == "__main__":
    main()
