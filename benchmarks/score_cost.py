"""Compares two ways to get the log-probabilities of a given continuation from vLLM, whose cache has its prefix.

    VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.score_cost [--prefixes 32] [--runs 9]

`VLLMEngine.score` makes one request, which asks for the log-probabilities of its prompt. The other way makes a request
for each token of the continuation: it generates one token after the tokens before it, and `logprob_token_ids` names the
token to report. Each run empties the cache, computes all prefixes, and then measures all continuations at once.
Writes benchmarks/results/score_cost.md.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import in_turns, parser_of, with_range, write_report
from benchmarks.rollout_cost import start_engine, write_peaked_model
from recipe.common.tiny_model import TinyModelConfig
from verl.workers.rollout.engines.interface import GenerationRequest
from verl.workers.rollout.engines.local_vllm import VLLMEngine

MODELS = {
    "0.36 M": TinyModelConfig(),
    "21 M": TinyModelConfig(hidden_size=384, intermediate_size=1024, num_layers=12, num_heads=6, num_kv_heads=6),
}
LENGTHS = (4, 12)
PROMPT, TOKENS = "prompt log-probabilities", "one-token requests"


class Scored(NamedTuple):
    """Seconds that all continuations took, the number of requests, and each continuation's log-probabilities."""

    seconds: float
    requests: int
    log_probs: list[list[float]]


async def score_by_tokens(engine: VLLMEngine, prefix: Sequence[int], continuation: Sequence[int]) -> list[float]:
    """Return the same log-probabilities as `VLLMEngine.score`, from one request for each token."""
    from vllm import SamplingParams

    async def log_prob(before: Sequence[int], token: int) -> float:
        engine.requests += 1
        params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[token], detokenize=False)
        outputs = engine.engine.generate(
            {"prompt_token_ids": [*prefix, *before]}, params, request_id=f"token-{engine.requests}"
        )
        last = [output async for output in outputs][-1]
        return last.outputs[0].logprobs[0][token].logprob

    return await asyncio.gather(*(log_prob(continuation[:i], token) for i, token in enumerate(continuation)))


async def measure(engine: VLLMEngine, way, prefixes, continuations, run: int) -> Scored:
    """Score the continuation of each prefix, with all prefixes in the cache, and return the cost.

    Args:
        way: `VLLMEngine.score`, or `score_by_tokens` with an engine.
    """
    await engine.forget_prefixes()
    await asyncio.gather(*(engine.generate(GenerationRequest(prefix, 1, [], seed=run)) for prefix in prefixes))
    requests, started = engine.requests, time.perf_counter()
    log_probs = await asyncio.gather(*(way(*each) for each in zip(prefixes, continuations, strict=True)))
    return Scored(time.perf_counter() - started, engine.requests - requests, log_probs)


def rows_of(model: str, loop: asyncio.AbstractEventLoop, engine: VLLMEngine, n: int, runs: int) -> list[list[str]]:
    """Return the table's rows for a model and `n` prefixes: one for each length of the continuations and each way."""
    draw, rows = random.Random(0), []
    prefixes = [[draw.randrange(200) for _ in range(draw.randint(100, 200))] for _ in range(n)]
    ways = {PROMPT: engine.score, TOKENS: partial(score_by_tokens, engine)}
    for length in LENGTHS:
        continuations = [[draw.randrange(200) for _ in range(length)] for _ in range(n)]

        def side(way, run: int, continuations=continuations) -> Scored:
            return loop.run_until_complete(measure(engine, way, prefixes, continuations, run))

        sides = {name: partial(side, way) for name, way in ways.items()}
        in_turns(sides, 1)  # first calls
        results = in_turns(sides, runs)
        difference = largest_difference(results[PROMPT], results[TOKENS])
        for name, scored in results.items():
            times = [other.seconds / each.seconds for other, each in zip(results[PROMPT], scored, strict=True)]
            seconds = with_range([each.seconds for each in scored], ".3f")
            rows.append([model, str(length), name, str(scored[0].requests), seconds, with_range(times, ".2f")])
            rows[-1].append("" if name == PROMPT else f"{difference:.0e}")
    return rows


def largest_difference(some: Sequence[Scored], others: Sequence[Scored]) -> float:
    """Return the largest absolute difference between log-probabilities of the same run, continuation and token."""
    return max(
        abs(a - b)
        for one, other in zip(some, others, strict=True)
        for these, those in zip(one.log_probs, other.log_probs, strict=True)
        for a, b in zip(these, those, strict=True)
    )


def main() -> None:
    args = parser_of(__doc__, prefixes=32, runs=9, note="").parse_args()
    loop, rows = asyncio.new_event_loop(), []
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_peaked_model(Path(folder) / "model", config)
            engine = start_engine(Path(folder) / "model", 300)
            rows += rows_of(name, loop, engine, args.prefixes, args.runs)
            engine.shutdown()
    header = ["parameters", "tokens of a continuation", "way", "requests", "seconds", "speed", "largest difference"]
    what = (
        f"{args.prefixes} prefixes of 100 to 200 tokens, all in the cache, with a continuation each; blocks of 32 "
        f"tokens, float32. Median of {args.runs} runs (range). Speed: the first way's seconds divided by this way's. "
        f"Largest difference: between the ways' log-probabilities, in nats. {args.note}".strip()
    )
    write_report("score_cost", what, header, rows)


if __name__ == "__main__":
    main()
