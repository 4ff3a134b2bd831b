"""An engine whose distributions follow from the tokens before them, and an environment that answers a letter: no model,
no tools, the same on every machine."""

import asyncio
import math
import random
from bisect import bisect
from itertools import accumulate

from verl.workers.rollout.engines.interface import Generation, GenerationRequest
from verl.workers.rollout.environment import Answer, Ends, Environment, TurnEnd

VOCAB, EOS = 20, 19
CALL = 18  # the letter s


class Letters:
    """A tokenizer of the letters a to t; t ends a response."""

    eos_token_id = EOS

    def __len__(self):
        return VOCAB

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


class HashEngine:
    """Token probabilities are powers of numbers drawn with the last `memory` tokens as the seed.

    Args:
        sharpness: the larger, the surer the engine is.
        memory: so many tokens decide about the next one.
        delay: most seconds that a request takes, drawn with `order`.

    Attributes:
        asked: the requests, in the order in which they came.
    """

    def __init__(self, sharpness=6.0, memory=6, delay=0.0, order=0):
        self.sharpness, self.memory, self.delay, self.clock = sharpness, memory, delay, random.Random(order)
        self.asked: list[GenerationRequest] = []

    def probabilities(self, tokens) -> list[float]:
        draw = random.Random(str(list(tokens[-self.memory :])))
        weights = [draw.random() ** self.sharpness for _ in range(VOCAB)]
        return [weight / sum(weights) for weight in weights]

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        await asyncio.sleep(self.clock.random() * self.delay)
        n_top_logprobs, temperature, draw = request.n_top_logprobs, request.temperature, random.Random(request.seed)
        result = Generation([], [], [] if n_top_logprobs else None, entropies=[] if request.n_entropy else None)
        while len(result.token_ids) < request.max_tokens and not result.stopped:
            p = self.probabilities([*request.prompt_ids, *result.token_ids])
            order = sorted(range(VOCAB), key=lambda token: -p[token])
            token = order[0]
            if temperature:
                tempered = [x ** (1 / temperature) for x in p]
                token = bisect(list(accumulate(tempered)), draw.random() * sum(tempered))
            if n_top_logprobs:
                result.top_logprobs.append([(t, math.log(p[t])) for t in order[:n_top_logprobs]])
            if result.entropies is not None:
                result.entropies.append(-sum(x * math.log(x) for x in p if x))
            result.token_ids.append(token)
            result.log_probs.append(math.log(p[token]))
            result.stopped = token in request.stop_token_ids
            if any(text in Letters().decode(result.token_ids) for text in request.stop):
                break
        return result


class Calls(Environment):
    """Every s calls; one to five tokens answer, which follow from the turn. They may hold s and t, too.

    Args:
        call_limit: of a trajectory.
        delay: most seconds that an answer takes, drawn with `order`.
    """

    def __init__(self, call_limit=3, delay=0.0, order=0):
        self.call_limit, self.delay, self.clock, self.answered = call_limit, delay, random.Random(order), []

    def stops(self, turn):
        return ["s"]

    def ends(self, turn, end_tokens):
        return TurnEnd(Ends.TURN, turn.index(CALL) + 1) if CALL in turn else super().ends(turn, end_tokens)

    async def answer(self, state, turn, max_tokens):
        self.answered.append(tuple(turn))
        if self.delay:
            await asyncio.sleep(self.clock.random() * self.delay)
        return Answer(answer_to(turn, max_tokens), ({"tool": "s"},))

    def metrics(self, calls):
        return {"tool_calls": float(len(calls))}


def answer_to(turn, max_tokens) -> list[int]:
    """Cut where it is too long; nothing where fewer than two tokens may be used, as a result needs its tags."""
    draw = random.Random(f"answer {list(turn)}")
    answer = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 5))]
    return answer[:max_tokens] if max_tokens >= 2 else []
