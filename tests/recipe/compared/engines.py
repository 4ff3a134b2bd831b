"""Engines for the tests of trees, one that remembers and one that always writes the same, and how trees are grown."""

import asyncio

from tests.recipe.arpo.toy_agent import encode
from tests.workers.rollout.toy_engine import EOS, VOCAB, Letters
from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.tree_builder import grow

PROMPT = (1, 2, 3)
CHAT = encode("<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n")


def letter(token):
    return Letters().decode([token])


def odd(tokens):
    return float(sum(tokens) % 2)


def scoring(reward_of):
    """A reward loop, and the list of the trajectories that it has scored."""
    scored = []

    async def score(tokens, about):
        assert about == {}
        scored.append(list(tokens))
        return reward_of(tokens)

    return score, scored


def grown_by(policy, engine, n, prompt=PROMPT, stop=EOS, **options):
    """The tree of n trajectories; `options` are arguments of `TreeBuilder`."""
    options = {"max_tokens": 30, "vocab_size": VOCAB, "stop_token_ids": [stop]} | options
    tree = asyncio.run(grow(engine, prompt, n, policy, **options))
    assert len(tree.leaves) == n
    return tree


class Recorder:
    """An engine that remembers the tokens after which it was asked."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    async def generate(self, request):
        self.asked.append(tuple(request.prompt_ids))
        return await self.engine.generate(request)


class Script:
    """An engine that always writes the same response after `PROMPT`, with these entropies."""

    def __init__(self, tokens, entropies=()):
        self.tokens, self.entropies = tokens, entropies

    async def generate(self, request):
        start = len(request.prompt_ids) - len(PROMPT)
        rest = self.tokens[start:][: request.max_tokens]
        entropies = list(self.entropies[start:][: len(rest)]) if request.n_entropy else None
        return Generation(rest, [-1.0] * len(rest), entropies=entropies)
