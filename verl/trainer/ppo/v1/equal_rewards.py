"""Sets the advantages of groups with equal outcomes to 0; upstream's estimators leave rounding errors there."""

from collections.abc import Sequence

import numpy as np
import torch
from omegaconf import DictConfig

from verl.trainer.ppo.credit.nodes import groups_of_equals
from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.utils.parts import Compares, compares


def rewards_column(algorithm: DictConfig) -> str:
    """Return the name of the column of token-level rewards that credit reads: `rm_scores`, or with `use_kl_in_reward`
    `token_level_rewards`, from which upstream has subtracted the KL penalty."""
    return "token_level_rewards" if algorithm.use_kl_in_reward else "rm_scores"


def zero_equal_groups(rows: BatchRows, algorithm: DictConfig) -> None:
    """Write advantages of 0 for the groups with equal outcomes, if the estimator compares only these outcomes."""
    if compares(algorithm.adv_estimator) is Compares.GROUP:
        rows.fetch("uid", rewards_column(algorithm))
        groups = torch.from_numpy(np.unique(rows.index, return_inverse=True)[1])
        equal = groups_of_equals(rows.tokens(rewards_column(algorithm), 0.0).sum(-1), groups)
        zero_advantages(rows, [row for row in rows.real if equal[row]])


def zero_advantages(rows: BatchRows, zeroed: Sequence[int]) -> None:
    """Write advantages and returns of 0 for these rows."""
    if zeroed:
        zeros = torch.zeros(len(zeroed), max(rows.tags[row]["response_len"] for row in zeroed))
        for name in ("advantages", "returns"):
            rows.put(name, zeros, zeroed)
