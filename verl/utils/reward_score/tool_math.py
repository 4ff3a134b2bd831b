"""Scores mathematics with tools: math-verify compares the \\boxed text in a trajectory's `<answer>` with the truth."""

from verl.utils.reward_score import math_equivalence
from verl.utils.reward_score.tool_format import TOOL_TAGS, check_format


def compute_score(data_source, solution_str, ground_truth, extra_info=None, tool_tags=TOOL_TAGS, **kwargs) -> dict:
    """Score a trajectory: 1 for a right answer, else 0. Its format is reported and does not change the score.

    Args:
        solution_str: the response; only the last closed `<answer>` outside tool results counts.
        ground_truth: LaTeX or a number, boxed or not.
        kwargs: of `math_equivalence.compute_score`, such as `timeout_seconds`.

    Returns:
        `score`, `acc` and `format` (0 or 1), `tool_calls`, the number of calls with a result before the first error in
        the format, and `pred`, the answer's text for majority votes, empty if there is no answer.

    Raises:
        ValueError: the ground truth is empty, or neither text nor a number.
        RuntimeError: math-verify does not start.
    """
    report = check_format(solution_str, tool_tags)
    result = math_equivalence.compute_score(data_source, report.answer, ground_truth, **kwargs)
    return {**result, "format": float(report.well_formed), "tool_calls": float(len(report.calls))}
