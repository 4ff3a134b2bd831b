"""A rollout engine that runs a `transformers` causal LM in this process, and a model without weights for it."""

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from verl.utils.entropy_estimate import entropies_of
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine
from vllm_patches.entropy_temperature import compute_entropy_based_temperature


class TransformersEngine(RolloutEngine):
    """A `transformers` causal LM that serves one request at a time: for tests, debugging and machines without vLLM.
    Requests with `stop` or `n_entropy` need the tokenizer."""

    def __init__(self, model, tokenizer=None):
        self.model, self.tokenizer = model, tokenizer

    async def generate(self, request: GenerationRequest) -> Generation:
        with torch.inference_mode():
            return self._continue(request)

    async def score(self, prompt_ids, continuation_ids, request_id=None) -> list[float]:
        n, tokens = len(continuation_ids), [*prompt_ids, *continuation_ids]
        if not n:
            return []
        inputs = torch.tensor([tokens], device=self.model.device)
        with torch.inference_mode():
            logits = self.model(inputs, logits_to_keep=n + 1, use_cache=False).logits[0, :-1]
        log_probs = logits.float().log_softmax(-1)
        return log_probs.gather(-1, inputs[0, -n:, None]).squeeze(-1).tolist()

    def _continue(self, request: GenerationRequest) -> Generation:
        tempered = (request.extra_args or {}).get("adaptive_temperature")
        generator = torch.Generator(self.model.device)
        generator.manual_seed(generator.seed() if request.seed is None else request.seed)
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
                if request.n_top_logprobs:  # topk and argmax may choose different tokens of equal probability
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
    """Return the logits (V,) with -inf for the tokens outside top-k and the top-p nucleus."""
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, order[before >= top_p], -torch.inf)
    return logits


class ToyModel:
    """Stands for a `transformers` causal LM: its distributions are drawn with the tokens before them as the seed.
    `weights` say how often it writes a token, on average; all others have a log-probability of about -30. The larger
    `sharpness`, the surer it is. The last `memory` tokens decide about the next one."""

    device = torch.device("cpu")

    def __init__(
        self, weights: Mapping[int, float], n_vocabulary: int, seed: int = 0, sharpness: float = 3.0, memory: int = 6
    ):
        self.tokens, self.usual = list(weights), torch.tensor(list(weights.values())).log()
        self.n_vocabulary, self.seed, self.sharpness, self.memory = n_vocabulary, seed, sharpness, memory

    def __call__(self, input_ids: torch.Tensor, past_key_values=None, logits_to_keep: int = 0, **options):
        """Return `logits` (1, number of tokens to keep, V) after each token, as transformers' models do."""
        before = past_key_values or []
        ids = [*before, *input_ids[0].tolist()]
        ends = range(len(before) + 1, len(ids) + 1)[-logits_to_keep:]
        logits = torch.stack([self._logits(ids[:end]) for end in ends])
        return SimpleNamespace(logits=logits.unsqueeze(0), past_key_values=ids)

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        draw = random.Random(f"{self.seed} {list(ids[-self.memory :])}")
        logits = torch.full((self.n_vocabulary,), -30.0)
        drawn = torch.tensor([draw.random() for _ in self.tokens]).clamp(1e-4).log()
        logits[self.tokens] = self.usual + self.sharpness * drawn
        return logits
