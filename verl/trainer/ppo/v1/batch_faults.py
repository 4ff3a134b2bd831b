"""Finds in a batch what no update can learn from."""

import torch

from verl.trainer.ppo.v1.batch_rows import BatchRows

# Columns of numbers for each token on which an update depends, in the order of their computation, and their source.
COMPUTED_BY = {
    "rm_scores": "the reward",
    "rollout_log_probs": "the engine, whose weights are then not those of the trainer",
    "old_log_probs": "the actor",
    "ref_log_prob": "the reference policy",
    "values": "the critic",
    "advantages": "algorithm.adv_estimator",
    "returns": "algorithm.adv_estimator",
}


def not_finite(rows: BatchRows) -> str | None:
    """Return a text that names the first column with NaN or infinity, and what computed it; None if there is none."""
    rows.fetch(*COMPUTED_BY)
    for name, computed_by in COMPUTED_BY.items():
        cells = rows.column(name, rows.real)
        if cells and not torch.cat(cells).isfinite().all():
            faulty = sum(not cell.isfinite().all() for cell in cells)
            return f"{name} of {faulty} of {len(cells)} responses, computed by {computed_by}"
    return None
