"""Scores answers by rule: mathematics by equivalence, questions by exact match and token F1."""

import json
import re
from typing import NamedTuple

from recipe.tasks.countdown import reward as countdown
from recipe.tasks.walk import reward as walk
from recipe.tasks.word_problems import reward as last_number
from verl.evaluation.questions.prompts import Question
from verl.utils.math_answers import comparison
from verl.utils.reward_score import qa
from verl.utils.reward_score.tool_format import check_format

# Only a <result> after a tool's closing tag is a tool's text; any other one was written by the model.
_RESULT_OF_A_CALL = re.compile(r"(</(?!think>|answer>)[\w-]+>\s*)<result>.*?(?:</result>|\Z)", re.DOTALL)


class Scored(NamedTuple):
    """The score of a response.

    Args:
        score: score in [0, 1]; None if the judge's reply cannot be read.
        answer: the answer that the response votes for; empty for no vote.
        more: other numbers (`f1`), and the `reply` of a judge.
    """

    score: float | None
    answer: str
    more: dict = {}


def without_results(response: str) -> str:
    """Return the text that the model wrote: the response without the results that follow tool calls."""
    return _RESULT_OF_A_CALL.sub(r"\1", response)


def final_answer(response: str) -> str | None:
    """Return the answer: the \\boxed text in <answer>, else all of <answer>, else the last \\boxed text, else None."""
    report = check_format(response)
    if report.boxed is not None:
        return qa.plain_text(report.boxed)
    if report.answer is not None:
        return report.answer.strip()
    boxed = comparison.last_boxed(without_results(response))
    return None if boxed is None else qa.plain_text(boxed)


def by_rule(scoring: str, question: Question, response: str) -> Scored:
    """Return the score of a response. `scoring` is a key of `SCORINGS` other than `judge`.

    The call blocks while mathematics is compared, so make it outside the event loop's thread.
    """
    if scoring in ("countdown", "walk"):
        task = countdown if scoring == "countdown" else walk
        result = task.compute_score(scoring, response, json.loads(question.answers[0]))
        return Scored(result["acc"], result["pred"])
    if scoring == "number":
        result = last_number.compute_score(scoring, response, question.answers[0])
        return Scored(result["acc"], result["pred"])
    if scoring == "math":
        answer = check_format(response).answer
        answer = without_results(response) if answer is None else answer
        results = [comparison.compute_score("math", answer, truth) for truth in question.answers]
        best = max(results, key=lambda result: result["acc"])
        return Scored(best["acc"], best["pred"])
    result = qa.compute_score("qa", final_answer(response) or "", question.answers)
    return Scored(result["acc"], result["pred"], {"f1": result["f1"]})
