"""vLLM's engine without Ray, for benchmarks of rollouts."""

from pathlib import Path

from verl.workers.rollout.entropy import entropies_of
from verl.workers.rollout.rollout_engine import Generation
from vllm_patches.candidates_without_text import leave_out_text


class VLLM:
    """vLLM's asynchronous engine as a `RolloutEngine`; counts what it generated and what its prefix cache gave."""

    def __init__(self, engine, vocab_size: int):
        self.engine, self.vocab_size = engine, vocab_size
        self.generated, self.cached, self.prompted, self.requests = 0, 0, 0, 0

    @classmethod
    def start(cls, model: str | Path) -> "VLLM":
        """An engine in float32 in a process of its own."""
        from transformers import AutoTokenizer
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
        self.prompted += len(prompt_ids)
        self.cached += last.num_cached_tokens or 0
        flat = output.logprobs
        chosen = [flat.logprobs[at] for at in flat.start_indices]
        generation = Generation(tokens, chosen, stopped=tokens[-1] in stop_token_ids)
        if n_candidates:
            generation.candidates = ranked(flat, n_candidates)
        if n_entropy:
            generation.entropies = entropies_of(top_log_probs(flat, n)[:, :n_entropy], self.vocab_size).tolist()
        return generation
