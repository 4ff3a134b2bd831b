"""What lockstep rounds cost when tools have a long tail: ARPO's rollout, every trajectory on its own, against rounds.

    bash recipe/arpo/run_search_task_sft_cpu.sh
    VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=2 python -m benchmarks.tool_rollout [--prompts 64] [--n 16] [--repeats 3]

One vLLM engine in float32 with the model of the cold start, so that calls are real; a search answers from the corpus
after a random latency: log-normal, 1 of 100 never (the tool's time limit ends it). `rounds` is the published way,
written here: all trajectories of all prompts generate to a tag, then all tools run, then all branches are made, and
nobody goes on before the slowest is done. Same engine, tools, limits and numbers of trajectories. Writes
benchmarks/results/tool_rollout.md.
"""

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path

import pyarrow.parquet as pq
from transformers import AutoTokenizer

from benchmarks.report import write_report
from benchmarks.vllm_engine import VLLM
from verl.workers.rollout.tool_tree.config import ToolTreeConfig
from verl.workers.rollout.tool_tree.growth import ToolTree
from verl.workers.rollout.tool_tree.protocol import Protocol
from verl.workers.rollout.tools.base_tool import BaseTool
from verl.workers.rollout.tools.search_tool import LocalSearchTool
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig

MEDIAN, SIGMA, NEVER = 0.5, 1.0, 0.01  # seconds, of the logarithm, share
TIMEOUT, ROOM = 20.0, 128
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


class SlowSearch(LocalSearchTool):
    """A search with a long tail; `seed` is the run's: both ways draw the same latencies."""

    seed, calls = 0, 0

    async def execute(self, content, *, timeout):
        SlowSearch.calls += 1
        rng = random.Random(f"{SlowSearch.seed} {SlowSearch.calls}")
        await asyncio.sleep(2 * TIMEOUT if rng.random() < NEVER else MEDIAN * rng.lognormvariate(0, SIGMA))
        return await super().execute(content, timeout=timeout)


class Sum(BaseTool):
    """Adds two numbers; the sandbox is not what is measured here."""

    name = trigger_tag = "python"

    async def execute(self, content, *, timeout):
        left, _, right = content.partition("+")
        return str(int(left) + int(right)) if left.isdigit() and right.isdigit() else "Error"


class Setting:
    def __init__(self, model: Path, data: Path, max_calls: int):
        self.tokenizer, self.engine = AutoTokenizer.from_pretrained(model), VLLM.start(model)
        tools = {
            "search": {"class_path": f"{__name__}.SlowSearch", "params": {"corpus": f"{data}/corpus.jsonl"}},
            "python": {"class_path": f"{__name__}.Sum"},
        }
        tools["search"]["params"]["max_results"] = 1
        self.tools = ToolBox(ToolsConfig(timeout=TIMEOUT, retry_count=0, max_workers=max_calls, tool_instances=tools))
        self.protocol = Protocol(self.tokenizer, list(self.tools.tools))
        rows = pq.read_table(data / "train.parquet", columns=["prompt"]).to_pylist()
        self.prompts = [self._ids(row["prompt"]) for row in rows]
        self.stop = [self.tokenizer.eos_token_id]
        self.config = ToolTreeConfig(entropy_tokens=4)

    def _ids(self, messages) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    async def trees(self, prompts, n, seed) -> int:
        """Calls made."""
        grown = [
            ToolTree(
                self.engine,
                self.tools,
                self.protocol,
                prompt,
                n,
                self.config,
                room=ROOM,
                stop_token_ids=self.stop,
                sampling=SAMPLING,
                seed=seed * 1000 + i,
            ).run()
            for i, prompt in enumerate(prompts)
        ]
        trees = await asyncio.gather(*grown)
        return sum(int(tree.metrics["tool_calls"]) for tree in trees)

    async def rounds(self, prompts, n, seed) -> int:
        """The published way; branches by a coin of `branch_probability`."""
        rng, calls = random.Random(seed), 0
        active = [(i, [], 0) for i in range(len(prompts)) for _ in range(self.config.initial_rollouts)]
        started = dict.fromkeys(range(len(prompts)), self.config.initial_rollouts)
        while active:
            turns = await asyncio.gather(*(self._turn(prompts[i], ids, rng.getrandbits(31)) for i, ids, _ in active))
            waiting = []
            for (i, ids, made), tokens in zip(active, turns, strict=True):
                call = self.protocol.first_call(tokens)
                if call and made < self.config.call_limit and len(ids) + len(tokens) < ROOM - 40:
                    waiting.append((i, [*ids, *tokens], made, self.protocol.content(tokens, call[1]), call[1]))
            results = await asyncio.gather(*(self.tools.call(tag, content or "") for *_, content, tag in waiting))
            calls += len(waiting)
            active = []
            for (i, ids, made, _, _), result in zip(waiting, results, strict=True):
                state = (i, [*ids, *self.protocol.result_ids(result.text, 40)], made + 1)
                active.append(state)
                if started[i] < n and rng.random() < self.config.branch_probability:
                    started[i] += 1
                    active.append(state)
            if not active:  # those that were not used for branches start from the prompt
                active = [(i, [], 0) for i in started for _ in range(n - started[i])]
                started = dict.fromkeys(started, n)
        return calls

    async def _turn(self, prompt, ids, seed) -> list[int]:
        generation = await self.engine.generate(
            [*prompt, *ids],
            max_tokens=ROOM - len(ids),
            stop_token_ids=self.stop,
            stop=self.protocol.stops([]),
            n_entropy=self.config.entropy_top_k,
            seed=seed,
            **SAMPLING,
        )
        return generation.token_ids


async def run(args) -> None:
    setting = Setting(args.model, args.data, args.prompts * args.n)
    prompts = setting.prompts[: args.prompts]
    seconds, calls = {"rounds": [], "trees": []}, {"rounds": [], "trees": []}
    for repeat in range(args.repeats):
        for way in seconds:
            SlowSearch.seed, SlowSearch.calls = repeat, 0
            started = time.perf_counter()
            calls[way].append(await getattr(setting, way)(prompts, args.n, repeat))
            seconds[way].append(time.perf_counter() - started)
            print(f"{way}: {seconds[way][-1]:.1f} s, {calls[way][-1]} calls")
    base = statistics.median(seconds["rounds"])
    names = {"rounds": "lockstep rounds (baseline)", "trees": "every trajectory on its own"}
    rows = [
        (
            names[way],
            f"{statistics.median(times):.1f}",
            f"{min(times):.1f} to {max(times):.1f}",
            f"{base / statistics.median(times):.2f}",
            f"{statistics.median(calls[way]):.0f}",
        )
        for way, times in seconds.items()
    ]
    write_report(
        "tool_rollout",
        f"{args.prompts} prompts x {args.n} trajectories, tools with log-normal latency (median {MEDIAN} s, sigma "
        f"{SIGMA}), {NEVER:.0%} time-outs of {TIMEOUT:.0f} s; {args.repeats} alternating repeats.",
        ("way", "median seconds", "range", "times faster", "tool calls"),
        rows,
    )
    setting.engine.engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("outputs/search_task_sft/huggingface"))
    parser.add_argument("--data", type=Path, default=Path("outputs/data/search_task"))
    for name, default in (("prompts", 64), ("n", 16), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not args.model.exists():
        parser.error(f"{args.model} does not exist: bash recipe/arpo/run_search_task_sft_cpu.sh makes it")
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
