"""Upstream's DAPO reward manager with the row's `ability` as a further input and the response's length as an output."""

import numpy as np
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

from verl import DataProto
from verl.utils.data_files import extra_info_of


class LengthAwareRewardManager(DAPORewardManager):
    """Adds `response_length` (tokens of the final sequence) to the reward's extra information.

    The reward function finds the column `ability` in `extra_info`. Without `overlong_buffer_cfg.enable` the reward is
    the plain score of the reward function.
    """

    async def run_single(self, data: DataProto) -> dict:
        final = data[-1:]  # Upstream scores the final sequence only.
        fields = final.non_tensor_batch
        extra_info = extra_info_of({name: values[0] for name, values in fields.items()})
        fields["extra_info"] = np.array([extra_info], dtype=object)
        result = await super().run_single(final)
        response_width = final.batch["responses"].shape[-1]
        length = final.batch["attention_mask"][0, -response_width:].sum()
        result["reward_extra_info"]["response_length"] = float(length)
        return result
