"""Scores mathematics by the last `\\boxed{...}` of a response, compared with the ground truth.

Equal text is right without a comparison. Everything else is compared by `equality.py`; an answer that it cannot read is
wrong. An integral or a nested series can take minutes, so comparisons run in processes of their own (`worker.py`) with
limits on time and memory; an answer that exceeds a limit counts as wrong. All functions work in any thread.
"""

import logging
import math
import re
from pathlib import Path

from verl.utils.math_answers.latex_spelling import plain_characters
from verl.utils.process_pool import ProcessPool

MAX_ANSWER_CHARS = 512
TIMEOUT_SECONDS = 5.0
_FOLDER = Path(__file__).parent
_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_LAYOUT = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|[\s~]")
_MIXED = re.compile(r"(\d)(?:\s|\\[,;:! ])+(\d+)/(\d+)")  # 1 1/2, which without the space is another number
_reported: list[str] = []
logger = logging.getLogger(__name__)
_POOL = ProcessPool("mathematics", str(_FOLDER / "worker.py"), str(_FOLDER))


def is_equivalent(truth: str, answer: str, seconds: float = TIMEOUT_SECONDS) -> bool:
    """Return whether the LaTeX `answer` equals `truth`; False if there is no verdict after `seconds`."""
    verdict = _POOL.ask([truth, answer, seconds], seconds)
    if verdict is None and not _reported:
        _reported.append(answer)
        logger.warning("no verdict within %s s: the answer counts as wrong (reported once): %.200r", seconds, answer)
    return bool(verdict)


def last_boxed(text: str) -> str | None:
    """Return the content of the last closed `\\boxed{...}` with balanced braces, in linear time; None if there is none.

    >>> last_boxed(r"so \\boxed{1}, no: \\boxed{\\frac{1}{2}} and \\boxed{3")
    '\\\\frac{1}{2}'
    """
    open_braces: list[int | None] = []  # where the content of a \boxed starts; None for any other brace
    start = end = -1
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None and opened > start:  # The inner one of nested boxes counts.
                start, end = opened, token.start()
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_braces.append(token.end())
    return text[start:end] if start >= 0 else None


def normalize(answer: str) -> str:
    """Return the text for comparing and voting: the answer without layout, outer dollars, period or percent sign.

    >>> normalize(r"$\\dfrac{1}{2}\\, $."), normalize(r"\\left[ 0, 1 \\right)"), normalize(r"50\\%")
    ('\\\\frac{1}{2}', '[0,1)', '50')
    """
    text = re.sub(r"\\?%$", "", _plain_formula(answer)).strip()
    text = _LAYOUT.sub("", _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _plain_formula(answer: str) -> str:
    """Return the answer in plain characters without outer dollars and a final period."""
    return without_dollars(plain_characters(answer).strip().rstrip(".").strip())


def without_dollars(text: str) -> str:
    """Return the formula of a text $formula$; other texts as they are."""
    is_one_formula = len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]
    return text[1:-1].strip() if is_one_formula else text


def math_truth(data_source: str, ground_truth) -> str:
    """Return the text of a mathematical answer."""
    if isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool) and math.isfinite(ground_truth):
        ground_truth = str(ground_truth)
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        raise ValueError(f"ground_truth of a {data_source} problem must be text or a number, got {ground_truth!r}")
    return ground_truth


def check_row(data_source, ground_truth, extra_info=None, **kwargs) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row."""
    math_truth(data_source, ground_truth)


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, timeout_seconds: float = TIMEOUT_SECONDS, **kwargs
) -> dict:
    """Score a response by its last `\\boxed{...}`, of at most 512 characters.

    The ground truth is LaTeX or a number, boxed or not. A comparison of more than `timeout_seconds` makes the answer
    wrong. The result has `score` and `acc` (0 or 1), and `pred`, the answer's text for majority votes, empty if there
    is no answer.
    """
    ground_truth = math_truth(data_source, ground_truth)
    answer = last_boxed(solution_str) if isinstance(solution_str, str) else None
    if answer is None or not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    truth = last_boxed(ground_truth) or ground_truth
    pred = normalize(answer)
    is_percentage, other = (_plain_formula(text).endswith("%") for text in (truth, answer))
    right = (pred == normalize(truth) and is_percentage == other) or is_equivalent(truth, answer, timeout_seconds)
    return {"score": float(right), "acc": float(right), "pred": pred}
