"""The process reward `recipe.tasks.walk.data.can_arrive` in GRPO's own reward, and with errors for HATO's search."""

import hashlib
import json

from recipe.hato.local_reward import Step
from recipe.tasks.walk import reward as walk
from recipe.tasks.walk.data import Problem, can_arrive, can_still_arrive

WEIGHT = 0.5  # weight of the steps in the reward; the answer has the rest
ERRORS = 0.2  # share of the beginnings of answers that are judged wrongly


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Return the result of `walk.compute_score` with the score (1 - WEIGHT) x score + WEIGHT x steps.

    `steps` is the number of steps of the response after which the target can still be reached, divided by the number
    of steps of the problem. A reward for whole responses cannot say which step was the wrong one.
    """
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    problem = Problem(**truth | {"operations": tuple(truth["operations"])})
    result = walk.compute_score(data_source, solution_str, truth, extra_info)
    lines = walk.answer_of(solution_str)[: walk.MAX_ANSWER_CHARS].splitlines(keepends=True)
    possible = sum(can_still_arrive(problem, "".join(lines[: i + 1])) for i in range(min(len(lines), problem.steps)))
    return result | {"score": (1 - WEIGHT) * result["score"] + WEIGHT * possible / problem.steps}


def can_arrive_with_errors(step: Step) -> float:
    """Return `can_arrive(step)` (0 or 1), inverted for a share ERRORS of the texts, chosen by their hash."""
    assert step.decode is not None
    text = step.decode([*step.problem, *step.before, *step.tokens])
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") / 2**32
    return 1 - can_arrive(step) if drawn < ERRORS else can_arrive(step)
