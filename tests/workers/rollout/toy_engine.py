"""An engine whose distributions follow from the tokens before them, and an environment that answers a letter: no model,
no tools, the same on every machine."""

import asyncio
import math
import random
from bisect import bisect
from dataclasses import replace
from itertools import accumulate

from verl.workers.rollout.engines.interface import Generation, GenerationRequest
from verl.workers.rollout.environment import Answer, Ends, Environment, TurnEnd
from verl.workers.rollout.stateful import Instance, InstanceKeys, InstancePool, StatefulEnvironment, Step

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
    """Token probabilities are powers of numbers drawn with the last `memory` tokens as the seed: the larger
    `sharpness`, the surer it is. A request takes up to `delay` seconds, drawn with `order`. `asked` are the requests so
    far."""

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
    """Every s calls; one to five tokens answer, which follow from the turn. They may hold s and t, too. An answer takes
    up to `delay` seconds, drawn with `order`."""

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


def game_step(actions) -> Step:
    """Return the game's step after these actions, of which the last one is new; its tokens depend on all of them."""
    draw = random.Random(f"game {[list(action) for action in actions]}")
    observation = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 5)))
    return Step(observation, float(len(actions)), done=draw.random() < 0.3)


class GameInstance(Instance):
    """A live game. What `game.fault` returns for the actions so far replaces a step: another one, an error, "hang"."""

    def __init__(self, game: "Game", actions=()):
        self.game, self.actions, self.is_closed, self.inside = game, list(actions), False, False
        game.made += 1
        game.alive += 1
        game.most_alive = max(game.most_alive, game.alive)

    async def _wait(self):
        assert not self.is_closed and not self.inside, "one call at a time, and none after close"
        self.inside = True
        await asyncio.sleep(self.game.clock.random() * self.game.delay)
        self.inside = False

    async def reset(self, recorded=None):
        await self._wait()
        return "begin"

    async def step(self, action, recorded=None):
        await self._wait()
        self.actions.append(action)
        fault = self.game.fault(self.actions, self.game.made)
        if fault == "hang":
            await asyncio.sleep(60)
        if isinstance(fault, Exception):
            raise fault
        return fault or game_step(self.actions)

    async def copy(self):
        await self._wait()
        return GameInstance(self.game, self.actions)

    async def close(self):
        assert not self.is_closed
        self.is_closed = True
        self.game.alive -= 1


class Game(StatefulEnvironment):
    """A turn ends with t and is an action; the answer follows from all actions so far. An instance's call takes up to
    `delay` seconds, drawn with `order`. `fault` is a function of the actions and the number of instances so far."""

    token_end = Ends.TURN

    def __init__(
        self, call_limit=3, delay=0.0, order=0, can_copy=False, max_instances=64, fault=lambda *_: None, timeout=5.0
    ):
        super().__init__(InstancePool(InstanceKeys(max_instances=max_instances, timeout=timeout)))
        self.can_copy, self.call_limit, self.delay = can_copy, call_limit, delay
        self.clock, self.fault = random.Random(order), fault
        self.made = self.alive = self.most_alive = 0

    def create(self):
        return GameInstance(self)

    def counted_rewards(self, rewards):
        return list(rewards)

    async def answer(self, state, turn, max_tokens):
        after = await self.advance(state, tuple(turn))
        tokens = list(after.step.observation) if len(after.step.observation) <= max_tokens else []
        return Answer(tokens, ({"tool": "game"},), after, after.step.done, after.step.reward)


def rewritten(actions) -> list[int] | None:
    """Return the prompt that replaces a `RewrittenGame`'s context after these actions, or None if the context stays."""
    return None if len(actions) % 2 else [4, *actions[-1]]


class RewrittenGame(Game):
    """A game that every second answer begins anew, with a prompt of its own."""

    changes_contexts = True

    async def answer(self, state, turn, max_tokens):
        answer = await super().answer(state, turn, max_tokens)
        return replace(answer, context=rewritten([at.action for at in answer.state.path()]))
