"""Engines for the tests of trees: one that remembers what it was asked, and one that always writes the same."""

from verl.workers.rollout.engines.interface import Generation

PROMPT = (1, 2, 3)


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
