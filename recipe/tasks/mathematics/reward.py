"""Scores mathematics by the last `\\boxed{...}` of a response; the reader of answers is verl/utils/math_answers/."""

import re

from verl.utils.math_answers.comparison import check_row, last_boxed
from verl.utils.math_answers.comparison import compute_score as score_boxed

__all__ = ["check_row", "compute_score"]
ANSWER_LINE = re.compile(r"answer\s*:([^\n]*)", re.IGNORECASE)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score a response as `comparison.compute_score` does. Prompts of DAPO-Math-17k as it is published (data source
    math_dapo) ask for a last line "Answer: ...", which counts where the response has no `\\boxed{...}`.

    >>> [compute_score(source, "So it is.\\nAnswer: 34", "34")["acc"] for source in ("math_dapo", "math500")]
    [1.0, 0.0]
    """
    if "math_dapo" in str(data_source) and isinstance(solution_str, str) and last_boxed(solution_str) is None:
        lines = ANSWER_LINE.findall(solution_str)
        solution_str = rf"\boxed{{{lines[-1]}}}" if lines else solution_str
    return score_boxed(data_source, solution_str, ground_truth, extra_info, **kwargs)
