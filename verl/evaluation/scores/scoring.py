"""Scores answers by rule: mathematics by equivalence, questions by exact match and token F1, tasks by their rewards."""

import re
from collections.abc import Callable
from typing import NamedTuple

from verl.evaluation.questions.prompts import Question
from verl.utils.math_answers import comparison
from verl.utils.parts import parts
from verl.utils.reward_score import qa
from verl.utils.reward_score.tool_format import check_format

# Only a <result> after a tool's closing tag is a tool's text; any other one was written by the model.
_RESULT_OF_A_CALL = re.compile(r"(</(?!think>|answer>)[\w-]+>\s*)<result>.*?(?:</result>|\Z)", re.DOTALL)

# the scoring by an environment with rewards, for the benchmarks of its tasks
ENVIRONMENT = "environment"


class Scored(NamedTuple):
    """The score of a response."""

    score: float | None  # in [0, 1]; None if the judge's reply cannot be read
    answer: str  # the response's vote; empty for no vote
    more: dict = {}  # other numbers (`f1`), and the `reply` of a judge


class Scoring(NamedTuple):
    """A way to score responses. `score` may block; it is None for the judge, a model behind a server."""

    about: str  # words for the user
    score: Callable[[Question, str], Scored] | None


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


def by_reward(compute_score: Callable[..., dict]) -> Callable[[Question, str], Scored]:
    """Return the scoring by a task's reward function, whose data source is empty: its `acc`, with the vote `pred`."""

    def score(question: Question, response: str) -> Scored:
        result = compute_score("", response, question.answers[0])
        return Scored(result["acc"], result["pred"])

    return score


def _score_mathematics(question: Question, response: str) -> Scored:
    answer = check_format(response).answer  # the part that holds the \boxed
    answer = without_results(response) if answer is None else answer
    results = [comparison.compute_score("math", answer, truth) for truth in question.answers]
    best = max(results, key=lambda result: result["acc"])
    return Scored(best["acc"], best["pred"])


def _score_words(question: Question, response: str) -> Scored:
    result = qa.compute_score("qa", final_answer(response) or "", question.answers)
    return Scored(result["acc"], result["pred"], {"f1": result["f1"]})


_scorings: dict[str, Scoring] = {}


def register_scoring(name: str, about: str, score: Callable[[Question, str], Scored] | None) -> None:
    """Register a scoring as `scoring=<name>`; see `Scoring`. Raise ValueError if there is one of this name."""
    if name in _scorings:
        raise ValueError(f"there are two scorings {name}: choose another name")
    _scorings[name] = Scoring(about, score)


register_scoring("math", "the last \\boxed against the answer, as mathematics", _score_mathematics)
register_scoring("qa", "exact match and token F1 with the best golden answer", _score_words)
register_scoring(ENVIRONMENT, "the environment's rewards", lambda question, response: Scored(0.0, ""))
register_scoring("judge", "a language model compares it with the golden answers", None)


def find_scoring(name: str) -> Scoring:
    """Return the scoring of a name; raise ValueError, with the names of all, if there is none."""
    parts("evaluation")  # This registers the tasks' scorings.
    if name not in _scorings:
        raise ValueError(f"scoring={name}: choose one of {', '.join(_scorings)}")
    return _scorings[name]
