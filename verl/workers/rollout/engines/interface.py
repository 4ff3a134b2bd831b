"""What a group rollout asks of an engine, and the engine on `transformers` in this process.

The other engine is vLLM behind upstream's LLM client. Same model, greedy: same tokens.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl.utils.entropy_estimate import entropies_of
from verl.utils.normalized_entropy import compute_entropy_based_temperature

TokenLogprob = tuple[int, float]


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
class Request:
    """What is asked of an engine.

    Args:
        prompt_ids: what is continued.
        max_tokens: so many new tokens at the most.
        stop_token_ids: the first of these ends the generation, and belongs to it.
        temperature: 0 is greedy.
        stop: texts, looked for in the new tokens only; it ends with the token that completes one of them.
        request_id: requests of one id go to the same replica, where their common prefix is cached.
        extra_args: vLLM's: what a logits processor is told, such as `adaptive_temperature`.
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
    async def generate(self, prompt_ids: Sequence[int], **options) -> Generation:
        """Continue `prompt_ids`; the options are the fields of `Request`."""
        return await self._generate(Request(prompt_ids, **options))

    @abstractmethod
    async def _generate(self, request: Request) -> Generation: ...


def end_of_sequence_ids(tokenizer, generation_config=None) -> list[int]:
    """Ids that end a response: the tokenizer's, and those of the generation config, where a server stops as well."""
    more = getattr(generation_config, "eos_token_id", None)
    more = more if isinstance(more, list) else [more]
    return sorted({token for token in (tokenizer.eos_token_id, *more) if token is not None})


def generation_config_of(model_path: str):
    """The model's `GenerationConfig`; None for a model without one."""
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


class TransformersEngine(RolloutEngine):
    """A `transformers` causal LM, one request at a time: for tests, debugging and machines without vLLM.

    `stop` and `n_entropy` need the tokenizer.
    """

    def __init__(self, model, tokenizer=None):
        self.model, self.tokenizer = model, tokenizer

    async def _generate(self, request: Request) -> Generation:
        with torch.inference_mode():
            return self._continue(request)

    def _continue(self, request: Request) -> Generation:
        tempered = (request.extra_args or {}).get("adaptive_temperature")
        generator = torch.Generator(self.model.device)
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed)
        stop_ids, cache = set(request.stop_token_ids), None
        inputs = torch.tensor([list(request.prompt_ids)], device=self.model.device)
        result, top = Generation([], [], [] if request.n_top_logprobs else None), []
        while len(result.token_ids) < request.max_tokens and not result.stopped:
            output = self.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logits = output.logits[0, -1]
            logits = logits if logits.dtype == torch.float64 else logits.float()
            raw = logits.log_softmax(-1)
            if request.n_top_logprobs:
                log_probs, tokens = raw.topk(request.n_top_logprobs)
                result.top_logprobs.append(list(zip(tokens.tolist(), log_probs.tolist(), strict=True)))
            if request.n_entropy:
                top.append(raw.topk(request.n_entropy).values.tolist())
            if request.temperature == 0:
                token, log_prob = int(raw.argmax()), float(raw.max())
                if request.n_top_logprobs:  # among equals, topk and argmax may differ
                    token, log_prob = result.top_logprobs[-1][0]
            else:
                if tempered:
                    logits = logits / compute_entropy_based_temperature(logits.unsqueeze(0), **tempered)
                chosen_from = restricted(logits / request.temperature, request.top_p, request.top_k).log_softmax(-1)
                token = int(torch.multinomial(chosen_from.exp(), 1, generator=generator))
                log_prob = float(chosen_from[token])
            result.token_ids.append(token)
            result.log_probs.append(log_prob)
            result.stopped = token in stop_ids
            if request.stop and any(text in self.tokenizer.decode(result.token_ids) for text in request.stop):
                break
            inputs = torch.tensor([[token]], device=self.model.device)
        if request.n_entropy:
            log_probs = np.array(top).reshape(len(top), request.n_entropy)
            result.entropies = entropies_of(log_probs, len(self.tokenizer)).tolist()
        return result


def restricted(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Logits (V,) with the tokens outside top-k and the top-p nucleus at -inf."""
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, order[before >= top_p], -torch.inf)
    return logits
