"""Scores mathematics by the last `\\boxed{...}` of a response; the reader of answers is verl/utils/math_answers/."""

from verl.utils.math_answers.comparison import check_row, compute_score

__all__ = ["check_row", "compute_score"]
