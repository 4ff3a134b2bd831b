"""The engine of group rollouts on a vLLM of this process's own, without Ray: for measurements of trees."""

from pathlib import Path

from verl.utils.entropy_estimate import entropies_of
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine
from vllm_patches.top_logprobs_without_text import leave_out_text


class VLLMEngine(RolloutEngine):
    """vLLM's asynchronous engine; counts its requests and the tokens that it generates.

    Top log-probs and entropies are those of the raw distribution (T = 1), unless `logprobs_mode` says otherwise.

    Args:
        engine: vLLM's `AsyncLLM`.
        vocab_size: tokens of the tokenizer, for entropies.
    """

    def __init__(self, engine, vocab_size: int):
        self.engine, self.vocab_size = engine, vocab_size
        self.generated, self.requests = 0, 0

    @classmethod
    def start(cls, model: str | Path, vocab_size: int, **arguments) -> "VLLMEngine":
        """An engine in a process of its own; `arguments` are vLLM's."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        leave_out_text()
        return cls(
            AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), disable_log_stats=True, **arguments)), vocab_size
        )

    def shutdown(self) -> None:
        engine, self.engine = self.engine, None  # else vLLM does it once more while the interpreter ends, and fails
        engine.shutdown()

    async def forget_prefixes(self) -> None:
        """Empty the cache of prefixes, so that what comes next is not helped by what was before."""
        await self.engine.reset_prefix_cache()

    async def generate(self, request: GenerationRequest) -> Generation:
        from vllm import SamplingParams

        from verl.workers.rollout.engines.top_logprobs_server import in_two_outputs, ranked, top_log_probs

        self.requests += 1
        n = max(request.n_top_logprobs, request.n_entropy)
        # as the rollout server does: see top_logprobs_server.py
        params = SamplingParams(
            max_tokens=request.max_tokens,
            ignore_eos=True,
            stop_token_ids=list(request.stop_token_ids),
            stop=list(request.stop),
            skip_special_tokens=False,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            logprobs=n,
            flat_logprobs=True,
            detokenize=bool(request.stop),
            extra_args=request.extra_args,
        )
        last = None
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        request_id = f"request-{self.requests}"
        async for part in in_two_outputs(self.engine, params, prompt=prompt, request_id=request_id):
            last = part
        output = last.outputs[0]
        self.generated += len(output.token_ids)
        flat = output.logprobs
        generation = Generation(list(output.token_ids), [flat.logprobs[at] for at in flat.start_indices])
        generation.stopped = bool(generation.token_ids) and generation.token_ids[-1] in request.stop_token_ids
        if request.n_top_logprobs:
            generation.top_logprobs = ranked(flat, request.n_top_logprobs)
        if request.n_entropy:
            top = top_log_probs(flat, n)[:, : request.n_entropy]
            generation.entropies = entropies_of(top, self.vocab_size).tolist()
        return generation
