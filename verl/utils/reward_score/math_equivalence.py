"""Scores mathematics by the last `\\boxed{...}` of a response, compared with the ground truth by math-verify.

Equal text is right at once; everything else is compared by sympy, which some answers keep busy for ever or make eat
all memory (9^{9^{9^9}}). So comparisons run in a few processes of their own, with a limit on time and memory: one that
exceeds it is killed and replaced, and the answer is wrong. A process pool of the standard library cannot do that: a
task past its time-out keeps its process. Works in any thread.
"""

import json
import logging
import os
import queue
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from verl.utils.reward_score.latex_spelling import plain_characters, readable

MAX_ANSWER_CHARS = 512
TIMEOUT_SECONDS = 5.0
START_SECONDS = 120.0
POOL_SIZE = min(4, os.cpu_count() or 1)
_WORKER = Path(__file__).with_name("equivalence_worker.py")
_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_LAYOUT = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|[\s~]")
_reported: set[str] = set()
logger = logging.getLogger(__name__)


class Comparer:
    """One process that compares answers; `compare` may be called by one thread at a time.

    Raises:
        RuntimeError: the process does not start; its own message is on stderr.
    """

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([sys.executable, str(_WORKER)], stdin=theirs, stdout=subprocess.DEVNULL)
        if self._reply(START_SECONDS) != b"r":
            self.kill()
            raise RuntimeError("math-verify does not start (see the error above): pip install math-verify")

    def compare(self, truth: str, answer: str, seconds: float) -> bool | None:
        """Verdict, or None where there is none after `seconds` or the process died; then it must not be used again."""
        try:
            self._socket.sendall(json.dumps([truth, answer, seconds]).encode() + b"\n")
        except OSError:
            return None
        return {b"1": True, b"0": False}.get(self._reply(seconds))

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _reply(self, seconds: float) -> bytes:
        self._socket.settimeout(seconds)
        try:
            return self._socket.recv(1)
        except OSError:  # TimeoutError included
            return b""


def _new_pool() -> None:
    """An empty pool: a slot that holds None gets its process when it is first needed."""
    global _pool
    _pool = queue.LifoQueue()
    for _ in range(POOL_SIZE):
        _pool.put(None)


_new_pool()
os.register_at_fork(after_in_child=_new_pool)  # two processes must not talk through one socket


def is_equivalent(truth: str, answer: str, seconds: float = TIMEOUT_SECONDS) -> bool:
    """Whether math-verify finds the LaTeX `answer` equal to `truth`; False after `seconds`.

    Starting a process takes about 2 s more: for the first calls, and for the next call after one that was killed.

    Raises:
        RuntimeError: math-verify is not installed or does not start.
    """
    comparer = _pool.get()
    verdict = None
    try:
        comparer = comparer or Comparer()
        verdict = comparer.compare(truth, answer, seconds)
    finally:
        if verdict is None and comparer is not None:
            comparer.kill()
            comparer = None
        _pool.put(comparer)
    if verdict is None:
        _report("timeout", f"an answer was not compared within {seconds} s and counts as wrong: {answer[:200]!r}")
    return bool(verdict)


def _report(kind: str, message: str) -> None:
    if kind not in _reported:
        _reported.add(kind)
        logger.warning("%s (reported once)", message)


def last_boxed(text: str) -> str | None:
    """Content of the last closed `\\boxed{...}`, braces balanced; None where there is none. Linear in the text.

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
            if opened is not None and opened > start:  # of nested ones the inner
                start, end = opened, token.start()
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_braces.append(token.end())
    return text[start:end] if start >= 0 else None


def normalize(answer: str) -> str:
    """Text by which answers are compared first, and voted on: without layout, dollars, final full stop or percent.

    >>> normalize(r"$\\dfrac{1}{2}\\, $."), normalize(r"\\left[ 0, 1 \\right)"), normalize(r"50\\%")
    ('\\\\frac{1}{2}', '[0,1)', '50')
    """
    text = _LAYOUT.sub("", _bare(answer))
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _bare(answer: str) -> str:
    """Without what math-verify does not read inside a box: outer dollars, a final full stop, a percent sign."""
    text = _undressed(answer)
    return text.removesuffix("%").removesuffix("\\").strip() if text.endswith("%") else text


def _undressed(answer: str) -> str:
    text = plain_characters(answer).strip().rstrip(".").strip()
    is_one_formula = len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]
    return text[1:-1].strip() if is_one_formula else text


def _comparisons(truth: str, answer: str) -> Iterator[tuple[str, str]]:
    """What math-verify is to compare: both without a percent sign, and 50% as a number with a truth that has none."""
    bare_truth, bare_answer = readable(_bare(truth)), readable(_bare(answer))
    yield bare_truth, bare_answer
    of_truth, of_answer = (_undressed(text).endswith("%") for text in (truth, answer))
    if of_truth and not of_answer:
        yield rf"\frac{{{bare_truth}}}{{100}}", bare_answer
    if of_answer and not of_truth:
        yield bare_truth, rf"\frac{{{bare_answer}}}{{100}}"


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, timeout_seconds: float = TIMEOUT_SECONDS, **kwargs
) -> dict:
    """Score one response.

    Args:
        solution_str: the response; its answer is the last `\\boxed{...}`, at most 512 characters.
        ground_truth: LaTeX or a number, boxed or not.
        timeout_seconds: after this long the answer is wrong (a percentage may be compared twice).

    Returns:
        `score` and `acc` (0 or 1), and `pred`, the answer's text for majority votes: empty where there is none.

    Raises:
        ValueError: the ground truth is empty or no text: the data are wrong, not the response.
        RuntimeError: math-verify does not start.
    """
    if isinstance(ground_truth, int | float):
        ground_truth = str(ground_truth)
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        raise ValueError(f"ground_truth of a {data_source} problem must be text or a number, got {ground_truth!r}")
    answer = last_boxed(solution_str) if isinstance(solution_str, str) else None
    if answer is None or not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    truth = last_boxed(ground_truth) or ground_truth
    pred = normalize(answer)
    right = pred == normalize(truth) or any(
        is_equivalent(*pair, timeout_seconds) for pair in _comparisons(truth, answer)
    )
    return {"score": float(right), "acc": float(right), "pred": pred}
