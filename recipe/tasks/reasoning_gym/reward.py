"""Scores a response by the verifier of its problem's family in reasoning-gym.

The answer is the last closed `<answer>...</answer>` of a response, else its last `\\boxed{...}`, else all of it. It may
be hostile: its length is bounded, and the verifiers run in confined processes with limits on time and memory
(`worker.py`). An answer that exceeds a limit has score 0.
"""

import json
import logging
from functools import cache
from pathlib import Path

from recipe.tasks.reasoning_gym.families import check_families, is_allowed, make_dataset
from verl.utils.math_answers.comparison import last_boxed
from verl.utils.process_pool import ProcessPool
from verl.utils.reward_score.ground_truth import json_object
from verl.utils.reward_score.tool_format import last_tagged
from verl.workers.rollout.tools.python import confinement

TIMEOUT_SECONDS = 5.0
logger = logging.getLogger(__name__)
_POOL = ProcessPool("reasoning-gym", str(Path(__file__).with_name("worker.py")), confinement.__file__)


def verify(family: str, config: dict, entry: dict, answer: str, seconds: float = TIMEOUT_SECONDS) -> float:
    """Return the score of an answer, 0 to 1; 0 if there is none after `seconds`. Raise ValueError for a bad row."""
    score = _POOL.ask([family, config, entry, answer, seconds], seconds + 1)
    if isinstance(score, str):
        raise ValueError(f"ground_truth: {score}")
    if score is None:
        logger.warning("%s: no score within %s s and 1 GB: the answer has 0: %.200r", family, seconds, answer)
    return score or 0.0


@cache
def _check_family(family: str, config: str) -> None:
    make_dataset(check_families([family])[0], json.loads(config))


def read_truth(ground_truth) -> tuple[str, dict, dict]:
    """Return family, config and entry (answer and metadata) of a ground truth."""
    truth = json_object(ground_truth, "family, config, answer and metadata")
    family, config, answer = truth.get("family"), truth.get("config"), truth.get("answer")
    if not isinstance(family, str) or not isinstance(config, dict) or not isinstance(truth.get("metadata"), dict):
        raise ValueError("ground_truth: expected a family's name, and objects config and metadata")
    if not isinstance(answer, str | None):
        raise ValueError(f"ground_truth: answer must be text or null, got {answer!r}")
    _check_family(family, json.dumps(config, sort_keys=True))
    return family, config, {"answer": answer, "metadata": truth["metadata"]}


def check_row(data_source, ground_truth, extra_info=None, families=None, **kwargs) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row. If `families` are
    given, rows may have no others."""
    family, _, _ = read_truth(ground_truth)
    if families and family not in check_families(families):
        raise ValueError(f"family {family} is not in task.families={list(families)}: make the data anew, or add it")


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, timeout_seconds: float = TIMEOUT_SECONDS, **kwargs
) -> dict:
    """Score a response.

    The ground truth is JSON text of `family`, `config`, `answer` and `metadata` (`data.py`). The result has `score`,
    the verifier's from 0 to 1, which may be partial; `acc`, 1 if it is 1, else 0; and `pred`, the answer's text for
    majority votes, empty for an answer that is not read. A ValueError means wrong data, not a wrong response.
    """
    family, config, entry = read_truth(ground_truth)
    response = solution_str if isinstance(solution_str, str) else ""
    marked = (text for text in (last_tagged(response), last_boxed(response)) if text is not None)
    answer = next(marked, response).strip()
    if not answer or not is_allowed(family, answer):
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    score = verify(family, config, entry, answer, timeout_seconds)
    return {"score": score, "acc": float(score == 1.0), "pred": answer}
