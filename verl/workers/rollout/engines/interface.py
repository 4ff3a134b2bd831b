"""The interface of rollout engines: requests and results. Engines with the same model give the same greedy tokens."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace


@dataclass
class Generation:
    """A continuation of some token ids.

    Args:
        token_ids: new tokens, including a stop token.
        log_probs: log-probability of each token under its sampling distribution; greedy: under the raw one (T = 1).
        top_logprobs: the `n_top_logprobs` most likely (token, log-probability) at each position, the most likely first;
            greedy: the first is the chosen token. None if not requested. They are raw (T = 1), except from vLLM with
            upstream's `logprobs_mode` of a run, processed_logprobs: then of the distribution that is sampled from.
        versions: pairs (number of tokens, version of the weights that made them), in order; empty if unknown.
        entropies: entropy in nats of the distribution of `top_logprobs` at each position, estimated from the
            `n_entropy` most likely tokens (`entropies_of`, over the tokenizer's vocabulary). None if not requested.
    """

    token_ids: list[int]
    log_probs: list[float]
    top_logprobs: list[list[tuple[int, float]]] | None = None
    stopped: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    entropies: list[float] | None = None

    def first(self, n: int) -> "Generation":
        """Return a generation of the first n tokens with their numbers, or this one if it has no more than n tokens. A
        shorter one is not `stopped`. Its `versions` are not cut: they still tell of the tokens after the first n."""
        if n >= len(self.token_ids):
            return self
        first = replace(self, token_ids=self.token_ids[:n], log_probs=self.log_probs[:n], stopped=False)
        first.top_logprobs, first.entropies = (part and part[:n] for part in (self.top_logprobs, self.entropies))
        return first


@dataclass(frozen=True)
class GenerationRequest:
    """A request to an engine; all engines take the same one."""

    prompt_ids: Sequence[int]
    max_tokens: int  # largest number of new tokens
    stop_token_ids: Sequence[int]  # they end the generation; the first that is sampled belongs to it
    temperature: float = 1.0  # 0 for greedy decoding
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None  # None for a random one
    n_top_logprobs: int = 0  # number of most likely tokens per position whose log-probabilities are reported
    n_entropy: int = 0  # number of most likely tokens per position from which the entropy is estimated; 0 for none
    stop: Sequence[str] = ()  # searched for in the new tokens; the token that completes one ends the generation
    request_id: str | None = None  # all requests of an id go to one replica, where their common prefix is cached
    extra_args: dict | None = None  # vLLM's: settings for samplers such as `adaptive_temperature`


class RolloutEngine(ABC):
    """A model that continues token ids: vLLM's servers, a local vLLM, or a local `transformers` model."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the continuation of `request.prompt_ids`."""

    async def score(
        self, prompt_ids: Sequence[int], continuation_ids: Sequence[int], request_id: str | None = None
    ) -> list[float]:
        """Return the log-probability in nats of each token of a continuation of `prompt_ids`, which are at least one.
        The distribution is the raw one (T = 1) of the engine's present weights, whatever the sampling parameters of
        `generate`. vLLM takes a common prefix from its cache."""
        raise NotImplementedError(f"{type(self).__name__} scores no continuations")


def last_scores(prompt_log_probs: Sequence[float], n_cached: int | None, n_prompt: int, n: int) -> list[float] | None:
    """Return the log-probabilities of a prompt's last n tokens from those that vLLM reports, from the second token on;
    None if some are missing.

    vLLM computes no log-probability for a token whose predecessor comes from the prefix cache: the V2 model runner
    leaves these tokens out, and the V1 runner reports uninitialized memory for them. The last n values are therefore
    correct unless the cache held all `n_prompt` tokens before the continuation.
    """
    if (n_cached or 0) > n_prompt - 1 or len(prompt_log_probs) < n:
        return None
    return list(prompt_log_probs[-n:])


def end_of_sequence_ids(tokenizer, model_path: str) -> list[int]:
    """Return the token ids that end a response, as for vLLM: those of the tokenizer, and of the model's generation
    config if it has one."""
    from transformers import GenerationConfig

    more = None
    with suppress(OSError):
        more = GenerationConfig.from_pretrained(model_path).eos_token_id
    more = more if isinstance(more, list) else [more]
    return sorted({token for token in (tokenizer.eos_token_id, *more) if token is not None})


async def gather_or_cancel(*coroutines) -> list:
    """Return the coroutines' results in order, as `asyncio.gather`; if one fails, cancel and await the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def result_in_thread(coroutine: Coroutine):
    """Return a coroutine's result; it runs in a thread of its own, so that the caller may be inside an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
