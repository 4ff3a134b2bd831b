"""Scores answers to questions by exact match and token F1 with the best of the gold answers.

Text is normalized as for SQuAD (arXiv 1606.05250): lower case, without punctuation, articles and extra white space. F1
is HotpotQA's (arXiv 1809.09600): yes, no and noanswer are right or wrong, never partly right.
"""

import json
import re
import string
from collections import Counter

MAX_ANSWER_CHARS = 4096
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_ALL_OR_NOTHING = frozenset(("yes", "no", "noanswer"))


def normalize(answer: str) -> str:
    """Return the text for comparing answers, as the module says.

    An answer that would become empty (A, +) keeps its articles and punctuation.

    >>> normalize("The  U.S. Army, an army"), normalize("A"), normalize(" + ")
    ('us army army', 'a', '+')
    """
    lower = answer.lower()
    return " ".join(_ARTICLES.sub(" ", lower.translate(_PUNCTUATION)).split()) or " ".join(lower.split())


def plain_text(boxed: str) -> str:
    """Return the content of a \\boxed as plain text: Paris for `\\text{Paris}`."""
    return _LATEX_TEXT.sub(r"\1", boxed)


def gold_answers(ground_truth) -> list[str]:
    """Return the right answers in a ground truth: a text or number, a list of these, or such a list as JSON text. A
    ValueError says that there is none: the data are wrong, not the response.

    >>> gold_answers('["Paris", "City of Light"]'), gold_answers("[sic]"), gold_answers(1912)
    (['Paris', 'City of Light'], ['[sic]'], ['1912'])
    """
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith("["):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError):
            ground_truth = [ground_truth]
    elif hasattr(ground_truth, "tolist"):  # Lists from parquet are numpy arrays.
        ground_truth = ground_truth.tolist()
    answers = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    for answer in answers:
        if not isinstance(answer, str | int | float) or not str(answer).strip():
            raise ValueError(f"ground_truth must be a non-empty text or number, or a list of these, got {answer!r}")
    if not answers:
        raise ValueError("ground_truth is an empty list")
    return [str(answer) for answer in answers]


def exact_match(answer: str, golds: list[str]) -> float:
    """Return 1 if `answer` equals one of `golds` after normalization, else 0; 0 for more than 4096 characters."""
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    return float(normalize(answer) in {normalize(gold) for gold in golds})


def token_f1(answer: str, golds: list[str]) -> float:
    """Return the largest F1 in [0, 1] between the words of the answer and a gold answer; 0 above 4096 characters.

    >>> token_f1("Barack H. Obama", ["Obama", "Barack Obama"])  # 2 of 3 words, 2 of 2: 2 * 2 / (3 + 2)
    0.8
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    words = normalize(answer)
    return max(_f1(words, normalize(gold)) for gold in golds)


def _f1(answer: str, gold: str) -> float:
    if answer == gold:
        return 1.0
    if answer in _ALL_OR_NOTHING or gold in _ALL_OR_NOTHING:
        return 0.0
    answer_words, gold_words = answer.split(), gold.split()
    common = (Counter(answer_words) & Counter(gold_words)).total()
    return 2 * common / (len(answer_words) + len(gold_words))


def check_row(data_source, ground_truth, extra_info=None, metric: str = "f1", **kwargs) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row."""
    if metric not in ("f1", "em"):
        raise ValueError(f"metric={metric!r}: choose f1 or em")
    gold_answers(ground_truth)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, metric: str = "f1", **kwargs) -> dict:
    """Score a bare answer by `metric`, `f1` or `em` (exact match); `deep_research` scores trajectories. The result has
    `score`, `acc` (exact match), `f1` in [0, 1], and `pred`, the normalized answer for majority votes."""
    check_row(data_source, ground_truth, metric=metric)
    golds = gold_answers(ground_truth)
    answer = solution_str if isinstance(solution_str, str) else ""
    em, f1, pred = exact_match(answer, golds), token_f1(answer, golds), normalize(answer[:MAX_ANSWER_CHARS])
    return {"score": em if metric == "em" else f1, "acc": em, "f1": f1, "pred": pred}
