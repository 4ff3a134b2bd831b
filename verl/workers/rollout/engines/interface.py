"""What a rollout asks of an engine, and what it gets. Engines with the same model give the same greedy tokens."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

TokenLogprob = tuple[int, float]  # token, log-probability


@dataclass
class Generation:
    """A continuation.

    Args:
        token_ids: new tokens, a stop token included.
        log_probs: of each token under the distribution that it was sampled from; greedy: the raw one (T = 1).
        top_logprobs: for each token the `n_top_logprobs` most likely ones with their raw log-probabilities (T = 1), the
            most likely first; greedy: the first is the token itself. None unless asked for.
        stopped: whether the last token is a stop token.
        versions: the weights that made it, (tokens, version) of each part; empty where the engine knows of none.
        entropies: in nats, for each token that of the distribution of `top_logprobs`, of which the `n_entropy` most
            likely tokens are looked at (`entropies_of`, over the tokenizer's vocabulary). None unless asked for.
    """

    token_ids: list[int]
    log_probs: list[float]
    top_logprobs: list[list[TokenLogprob]] | None = None
    stopped: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    entropies: list[float] | None = None

    def first(self, n: int) -> "Generation":
        """Its first n tokens, as if it had ended there."""
        if n >= len(self.token_ids):
            return self
        parts = {name: getattr(self, name) for name in ("top_logprobs", "entropies")}
        cut = {name: part if part is None else part[:n] for name, part in parts.items()}
        return Generation(self.token_ids[:n], self.log_probs[:n], versions=self.versions, **cut)


@dataclass(frozen=True)
class GenerationRequest:
    """A request to an engine; every engine takes it as it is.

    Args:
        prompt_ids: token ids that are continued.
        max_tokens: largest number of new tokens.
        stop_token_ids: the first of these ends the generation, and belongs to it.
        temperature: 0 is greedy.
        top_p, top_k: as vLLM's; 1.0 and -1 leave the distribution whole.
        seed: seed of the sampling; None for a random one.
        n_top_logprobs: number of most likely tokens per position whose log-probabilities are reported.
        n_entropy: number of most likely tokens per position of which the entropy is estimated; 0 for no entropies.
        stop: texts, looked for in the new tokens only; the token that completes one of them ends the generation.
        request_id: requests of one id go to the same replica, where their common prefix is cached.
        extra_args: vLLM's: what a logits processor reads, such as `adaptive_temperature`.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: Sequence[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    n_top_logprobs: int = 0
    n_entropy: int = 0
    stop: Sequence[str] = ()
    request_id: str | None = None
    extra_args: dict | None = None


class RolloutEngine(ABC):
    """Something that continues token ids: vLLM's servers, a local vLLM, a local `transformers` model."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the continuation of `request.prompt_ids`."""

    async def score(
        self, prompt_ids: Sequence[int], continuation_ids: Sequence[int], request_id: str | None = None
    ) -> list[float]:
        """Return the log-probability in nats of each token of a given continuation.

        It is that of the raw distribution (T = 1) of the weights that the engine has when it is asked, whatever tokens
        are sampled with. vLLM takes a common prefix from its cache.

        Args:
            prompt_ids: tokens before the continuation, at least one.
            continuation_ids: tokens to score.
            request_id: see `GenerationRequest`.
        """
        raise NotImplementedError(f"{type(self).__name__} scores no continuations")


def last_scores(prompt_log_probs: Sequence[float], n_cached: int | None, n_prompt: int, n: int) -> list[float] | None:
    """Return the log-probabilities of a prompt's last n tokens out of those that vLLM reports; None if it lacks some.

    vLLM computes none for tokens whose predecessors it takes from the prefix cache: its V2 model runner leaves them
    out, and the older one reports unset memory for them. So the last ones are right unless the cache holds a token
    of the continuation that another one follows.

    Args:
        prompt_log_probs: as reported, without the first token's.
        n_cached: number of the prompt's tokens that came from the cache.
        n_prompt: number of tokens before the continuation.
        n: number of tokens of the continuation.
    """
    if (n_cached or 0) > n_prompt - 1 or len(prompt_log_probs) < n:
        return None
    return list(prompt_log_probs[-n:])


def end_of_sequence_ids(tokenizer, generation_config=None) -> list[int]:
    """Return the ids that end a response: the tokenizer's, and the generation config's, at which a server stops too."""
    more = getattr(generation_config, "eos_token_id", None)
    more = more if isinstance(more, list) else [more]
    return sorted({token for token in (tokenizer.eos_token_id, *more) if token is not None})


def generation_config_of(model_path: str):
    """Return the model's `GenerationConfig`; None for a model without one."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:
        return None


async def gather_or_cancel(*coroutines) -> list:
    """`asyncio.gather` that leaves nothing running: when one fails, the others are cancelled and have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
