"""What an answer is worth: mathematics by equivalence, questions by exact match and token F1, or a judge's verdict."""

import asyncio
import json
from dataclasses import dataclass, field

from verl.evaluation.judge import JudgeCache, cache_key, is_judgeable, judge_messages, parse_verdict
from verl.evaluation.questions import Question
from verl.evaluation.server import ChatModel
from verl.utils.reward_score import countdown, math_equivalence
from verl.utils.reward_score.qa import exact_match, normalise, plain_text, token_f1
from verl.utils.reward_score.tool_format import check_format


@dataclass(frozen=True)
class Scored:
    """A verdict.

    Args:
        score: in [0, 1]; None: a judge's reply that cannot be read.
        answer: what it votes for; empty: it does not vote.
        more: other numbers (`f1`) and, of a judge, its `reply`.
    """

    score: float | None
    answer: str
    more: dict = field(default_factory=dict)


def final_answer(response: str) -> str | None:
    """What a response answers: the text in \\boxed of its <answer>, or all of its <answer>, or its last \\boxed."""
    report = check_format(response)
    if report.boxed is not None:
        return plain_text(report.boxed)
    if report.answer is not None:
        return report.answer.strip()
    boxed = math_equivalence.last_boxed(response)
    return None if boxed is None else plain_text(boxed)


def by_rule(question: Question, scoring: str, response: str) -> Scored:
    """By `math`, `qa` or `countdown`; runs other processes for mathematics, so not on an event loop."""
    if scoring == "countdown":
        found = countdown.compute_score("countdown", response, json.loads(question.answers[0]))
        return Scored(found["acc"], found["pred"])
    if scoring == "math":
        answer = check_format(response).answer
        said = response if answer is None else answer
        found = [math_equivalence.compute_score("math", said, truth) for truth in question.answers]
        best = max(found, key=lambda one: one["acc"])
        return Scored(best["acc"], best["pred"])
    answer = final_answer(response) or ""
    em, f1 = exact_match(answer, question.answers), token_f1(answer, question.answers)
    return Scored(em, normalise(answer[:4096]), {"f1": f1})


class Judge:
    """A language model that compares answers; what it said is kept, and never asked again.

    Args:
        model: the judge.
        cache: its replies.
        sampling: temperature, max_tokens, seed, ….
    """

    def __init__(self, model: ChatModel, cache: JudgeCache, sampling: dict):
        self.model, self.cache, self.sampling = model, cache, sampling
        self.asking: dict[str, asyncio.Task[str]] = {}  # by cache key

    async def score(self, question: Question, response: str) -> Scored:
        answer = final_answer(response)
        if not is_judgeable(answer):
            return Scored(0.0, "")
        messages = judge_messages(question.text, question.answers, answer)
        key = cache_key(self.model.model, messages, self.sampling)
        reply = self.cache.get(key)
        if reply is None:
            if key not in self.asking:
                self.asking[key] = asyncio.create_task(self._ask(key, messages))
            reply = await asyncio.shield(self.asking[key])
        verdict = parse_verdict(reply)
        f1 = {"f1": token_f1(answer, question.answers)}
        return Scored(None if verdict is None else float(verdict), normalise(answer), f1 | {"reply": reply})

    async def _ask(self, key: str, messages: list[dict]) -> str:
        try:
            reply, _ = await self.model.ask(messages, **self.sampling)
            self.cache.put(key, reply)
            return reply
        finally:
            del self.asking[key]
