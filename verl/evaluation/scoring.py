"""Scores answers: mathematics by equivalence, questions by exact match and token F1 or by a judge's verdict."""

import asyncio
import json
from dataclasses import dataclass, field

from verl.evaluation.judge import JudgeCache, cache_key, is_judgeable, judge_messages, parse_verdict
from verl.evaluation.questions import Question
from verl.evaluation.server import ChatModel
from verl.utils.reward_score import countdown, math_equivalence
from verl.utils.reward_score.qa import exact_match, normalize, plain_text, token_f1
from verl.utils.reward_score.tool_format import check_format


@dataclass(frozen=True)
class Scored:
    """The score of a response.

    Args:
        score: in [0, 1]; None: the judge's reply cannot be read.
        answer: the answer that the response votes for; empty: no vote.
        more: other numbers (`f1`), and the `reply` of a judge.
    """

    score: float | None
    answer: str
    more: dict = field(default_factory=dict)


def final_answer(response: str) -> str | None:
    """A response's answer: the \\boxed text in its <answer>, else all of its <answer>, else its last \\boxed text."""
    report = check_format(response)
    if report.boxed is not None:
        return plain_text(report.boxed)
    if report.answer is not None:
        return report.answer.strip()
    boxed = math_equivalence.last_boxed(response)
    return None if boxed is None else plain_text(boxed)


def by_rule(question: Question, scoring: str, response: str) -> Scored:
    """Score by `math`, `qa` or `countdown`. For mathematics it waits for other processes: keep it off event loops."""
    if scoring == "countdown":
        result = countdown.compute_score("countdown", response, json.loads(question.answers[0]))
        return Scored(result["acc"], result["pred"])
    if scoring == "math":
        answer = check_format(response).answer
        answer = response if answer is None else answer
        results = [math_equivalence.compute_score("math", answer, truth) for truth in question.answers]
        best = max(results, key=lambda result: result["acc"])
        return Scored(best["acc"], best["pred"])
    answer = final_answer(response) or ""
    em, f1 = exact_match(answer, question.answers), token_f1(answer, question.answers)
    return Scored(em, normalize(answer[:4096]), {"f1": f1})


class Judge:
    """A language model that compares answers. Its replies are kept, so that it is never asked the same twice.

    Args:
        model: the judge's model.
        cache: of its replies.
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
        return Scored(None if verdict is None else float(verdict), normalize(answer), f1 | {"reply": reply})

    async def _ask(self, key: str, messages: list[dict]) -> str:
        try:
            reply, _ = await self.model.ask(messages, **self.sampling)
            self.cache.put(key, reply)
            return reply
        finally:
            del self.asking[key]
