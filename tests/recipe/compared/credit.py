"""The advantages of the credits that compare the outcomes of trees of trajectories."""

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS


def advantage(name, scores, segment_ids, index, mask=None, norm=True, **keys) -> torch.Tensor:
    """(B, T) float64; without a mask every token is the model's."""
    segment_ids = torch.as_tensor(segment_ids)
    mask = (segment_ids >= 0).double() if mask is None else torch.as_tensor(mask, dtype=torch.double)
    rewards = torch.zeros(segment_ids.shape, dtype=torch.double)
    rewards[:, -1] = torch.as_tensor(scores, dtype=torch.double)
    config = {"norm_adv_by_std_in_grpo": norm, name: keys}
    with SEGMENT_IDS.bound(segment_ids):
        return get_adv_estimator_fn(name)(rewards, mask, np.array(index, dtype=object), config=config)[0]
