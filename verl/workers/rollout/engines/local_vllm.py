"""A rollout engine on a vLLM that this process starts itself, without Ray, for measurements of trees."""

from pathlib import Path

from verl.workers.rollout.answer_likelihood import MAX_SCORED_TOKENS
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine, last_scores
from vllm_patches.top_logprobs_without_text import leave_out_text


class VLLMEngine(RolloutEngine):
    """vLLM's asynchronous engine. Top log-probs and entropies are those of the raw distribution (T = 1), unless
    `logprobs_mode` says otherwise. `vocab_size`, the size of the tokenizer's vocabulary, is needed for entropies."""

    def __init__(self, engine, vocab_size: int):
        self.engine, self.vocab_size, self.requests = engine, vocab_size, 0

    @classmethod
    def start(cls, model: str | Path, vocab_size: int, **arguments) -> "VLLMEngine":
        """Start vLLM in a new process and return its engine; `arguments` are vLLM's engine arguments."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        leave_out_text()
        longest = min(arguments.get("max_model_len", MAX_SCORED_TOKENS), MAX_SCORED_TOKENS)
        arguments = {"long_prefill_token_threshold": longest} | arguments
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), disable_log_stats=True, **arguments))
        return cls(engine, vocab_size)

    def shutdown(self) -> None:
        engine, self.engine = self.engine, None  # otherwise vLLM shuts down again at interpreter exit, and fails
        engine.shutdown()

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that later requests do not profit from earlier ones."""
        await self.engine.reset_prefix_cache()

    async def generate(self, request: GenerationRequest) -> Generation:
        from vllm import SamplingParams

        from verl.workers.rollout.engines.top_logprobs_server import in_two_outputs, top_of_steps

        self.requests += 1
        # these options are those of the rollout server: see top_logprobs_server.py
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
            logprobs=max(request.n_top_logprobs, request.n_entropy),
            flat_logprobs=True,
            detokenize=bool(request.stop),
            extra_args=request.extra_args,
        )
        prompt, request_id = {"prompt_token_ids": list(request.prompt_ids)}, f"request-{self.requests}"
        outputs = in_two_outputs(self.engine, params, prompt=prompt, request_id=request_id)
        *_, last = [output async for output in outputs]
        logprobs, token_ids = last.outputs[0].logprobs, list(last.outputs[0].token_ids)
        return Generation(
            token_ids,
            [logprobs.logprobs[at] for at in logprobs.start_indices],
            stopped=bool(token_ids) and token_ids[-1] in request.stop_token_ids,
            **top_of_steps(logprobs, request.n_top_logprobs, request.n_entropy, self.vocab_size),
        )

    async def score(self, prompt_ids, continuation_ids, request_id=None) -> list[float]:
        if not continuation_ids:
            return []
        prompt = {"prompt_token_ids": [*prompt_ids, *continuation_ids]}
        for skip_cache in (False, True):
            self.requests += 1
            output = await self._only_output(prompt, skip_cache)
            reported = [next(iter(token.values())).logprob for token in output.prompt_logprobs[1:] if token]
            scores = last_scores(reported, output.num_cached_tokens, len(prompt_ids), len(continuation_ids))
            if scores is not None:
                return scores
        raise RuntimeError(f"vLLM reported {len(reported)} log-probabilities of a prompt of {len(prompt_ids)} tokens")

    async def _only_output(self, prompt: dict, skip_cache: bool):
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, skip_reading_prefix_cache=skip_cache
        )
        outputs = self.engine.generate(prompt, params, request_id=f"request-{self.requests}")
        return [output async for output in outputs][-1]
