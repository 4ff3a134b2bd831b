"""Scores a response by the verifier of its problem's family in reasoning-gym.

The answer is the last closed `<answer>...</answer>` of a response, else its last `\\boxed{...}`, else all of it. It may
be hostile: its length is bounded, and the verifiers run in a few confined processes with limits on time and memory
(`worker.py`). An answer that exceeds a limit has score 0, and its process is replaced.
"""

import json
import logging
import os
import queue
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from recipe.tasks.reasoning_gym.families import check_families, is_allowed, make_dataset
from verl.utils.math_answers.comparison import last_boxed
from verl.utils.reward_score.ground_truth import json_object
from verl.utils.reward_score.tool_format import last_tagged
from verl.workers.rollout.tools.python import confinement

TIMEOUT_SECONDS = 5.0
START_SECONDS = 120.0
POOL_SIZE = min(4, os.cpu_count() or 1)
logger = logging.getLogger(__name__)


class Verifier:
    """A process that scores answers; only one thread at a time may call `ask`."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(Path(__file__).with_name("worker.py")), confinement.__file__]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._replies = self._socket.makefile(encoding="utf-8")
        if self.ask(None, START_SECONDS) != "ready":
            self.kill()
            raise RuntimeError("the verifiers of reasoning-gym do not start (see the error above)")

    def ask(self, request: list | None, seconds: float) -> Any:
        """Return the reply; None if there is none after `seconds`, after which the process must not be used again."""
        self._socket.settimeout(seconds)
        try:
            if request is not None:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
            return json.loads(self._replies.readline())
        except (OSError, ValueError):  # OSError includes TimeoutError; an empty line is the end of the process.
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


_pool: "queue.LifoQueue[Verifier | None]"


def _new_pool() -> None:
    """Make a pool without processes: a slot with None gets its process when it is first needed."""
    global _pool
    _pool = queue.LifoQueue()
    for _ in range(POOL_SIZE):
        _pool.put(None)


_new_pool()
os.register_at_fork(after_in_child=_new_pool)  # Two processes must not share a socket.


def verify(family: str, config: dict, entry: dict, answer: str, seconds: float = TIMEOUT_SECONDS) -> float:
    """Return the score of an answer, 0 to 1; 0 if there is none after `seconds`.

    Raises:
        ValueError: the verifier cannot use the row.
        RuntimeError: no process starts.
    """
    verifier, score = _pool.get(), None
    try:
        verifier = verifier or Verifier()
        score = verifier.ask([family, config, entry, answer, seconds], seconds + 1)
    finally:
        if score is None and verifier is not None:
            verifier.kill()
            verifier = None
        _pool.put(verifier)
    if isinstance(score, str):
        raise ValueError(f"ground_truth: {score}")
    if score is None:
        logger.warning("%s: no score within %s s and 1 GB: the answer has 0: %.200r", family, seconds, answer)
    return score or 0.0


@cache
def _check_family(family: str, config: str) -> None:
    check_families([family])
    make_dataset(family, json.loads(config))


def read_truth(ground_truth) -> tuple[str, dict, dict]:
    """Return family, config and entry (answer and metadata) of a ground truth.

    Raises:
        ValueError: a part is missing, or the family or its config is unknown.
    """
    truth = json_object(ground_truth, "family, config, answer and metadata")
    family, config, answer = truth.get("family"), truth.get("config"), truth.get("answer")
    if not isinstance(family, str) or not isinstance(config, dict) or not isinstance(truth.get("metadata"), dict):
        raise ValueError("ground_truth: expected a family's name, and objects config and metadata")
    if not isinstance(answer, str | None):
        raise ValueError(f"ground_truth: answer must be text or null, got {answer!r}")
    _check_family(family, json.dumps(config, sort_keys=True))
    return family, config, {"answer": answer, "metadata": truth["metadata"]}


def check_row(data_source, ground_truth, extra_info=None, families=None, **kwargs) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row.

    `families` are the only ones that rows may have; None or an empty list allows all.
    """
    family, _, _ = read_truth(ground_truth)
    if families and family not in check_families(families):
        raise ValueError(f"family {family} is not in task.families={list(families)}: make the data anew, or add it")


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, timeout_seconds: float = TIMEOUT_SECONDS, **kwargs
) -> dict:
    """Score a response.

    Args:
        ground_truth: JSON text of `family`, `config`, `answer` and `metadata`, see `data.py`.
        timeout_seconds: time limit of a verifier in seconds, after which the answer has score 0.

    Returns:
        `score`, the verifier's score from 0 to 1, which may be partial; `acc`, 1 if it is 1, else 0; and `pred`, the
        answer's text for majority votes, empty for an answer that is not read.

    Raises:
        ValueError: the verifier cannot use the ground truth: the data are wrong, not the response.
        RuntimeError: the verifiers do not start.
    """
    family, config, entry = read_truth(ground_truth)
    response = solution_str if isinstance(solution_str, str) else ""
    marked = (text for text in (last_tagged(response), last_boxed(response)) if text is not None)
    answer = next(marked, response).strip()
    if not answer or not is_allowed(family, answer):
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    score = verify(family, config, entry, answer, timeout_seconds)
    return {"score": score, "acc": float(score == 1.0), "pred": answer}
