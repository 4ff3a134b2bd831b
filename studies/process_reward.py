"""Uses `recipe.common.tasks.walk.can_arrive` as GRPO's own reward, and with errors for HATO's search."""

import hashlib
import json

from recipe.common.tasks.walk import Problem, Step, can_arrive, can_still_arrive
from verl.utils.reward_score import walk

WEIGHT = 0.5  # of the steps in the reward; the rest is of the answer
ERRORS = 0.2  # share of the beginnings that are judged wrongly


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """`walk.compute_score` with the steps in its score: WEIGHT times the share of them after which the target can be
    reached, as many as the problem asks for being all.

    A reward for each step would also say which step was the wrong one; this is what a reward for responses can hold.
    """
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    problem = Problem(**truth | {"operations": tuple(truth["operations"])})
    result = walk.compute_score(data_source, solution_str, truth, extra_info)
    lines = walk.answer_of(solution_str)[: walk.MAX_ANSWER_CHARS].splitlines(keepends=True)
    possible = sum(can_still_arrive(problem, "".join(lines[: i + 1])) for i in range(min(len(lines), problem.steps)))
    return result | {"score": (1 - WEIGHT) * result["score"] + WEIGHT * possible / problem.steps}


def can_arrive_with_errors(step: Step) -> float:
    """`can_arrive`, wrong for a share ERRORS of the beginnings, always the same ones."""
    assert step.decode is not None
    text = step.decode([*step.problem, *step.before, *step.tokens])
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") / 2**32
    return 1 - can_arrive(step) if drawn < ERRORS else can_arrive(step)
