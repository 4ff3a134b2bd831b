"""Mathematics with tools: the \\boxed of the trajectory's `<answer>`, compared with the ground truth by math-verify."""

from verl.utils.reward_score import math_equivalence
from verl.utils.reward_score.tool_format import TOOL_TAGS, check_format


def compute_score(data_source, solution_str, ground_truth, extra_info=None, tool_tags=TOOL_TAGS, **kwargs) -> dict:
    """Score one trajectory: 1 for a right answer, else 0; its form is told, not rewarded.

    Args:
        solution_str: the response; only the last closed `<answer>` outside tool results counts.
        ground_truth: LaTeX or a number, boxed or not.
        kwargs: `math_equivalence.compute_score`'s, such as `timeout_seconds`.

    Returns:
        `score`, `acc` and `format` (0 or 1), `tool_calls` (calls with a result, up to the first fault in the form), and
        `pred`, the answer's text for majority votes: empty where there is none.

    Raises:
        ValueError: the ground truth is empty or no text.
        RuntimeError: math-verify does not start.
    """
    report = check_format(solution_str, tool_tags)
    result = math_equivalence.compute_score(data_source, report.answer, ground_truth, **kwargs)
    return {**result, "format": float(report.well_formed), "tool_calls": float(len(report.calls))}
