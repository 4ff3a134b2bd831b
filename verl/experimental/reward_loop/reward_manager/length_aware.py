"""Upstream's DAPO reward manager that also reports the length of each response, for validation."""

from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

from verl import DataProto


class LengthAwareRewardManager(DAPORewardManager):
    """Adds `response_length` (tokens of the final sequence) to the reward's extra information.

    Without `overlong_buffer_cfg.enable` the reward is the plain score of the reward function.
    """

    async def run_single(self, data: DataProto) -> dict:
        result = await super().run_single(data)
        final = data[-1].batch
        response_width = final["responses"].shape[-1]
        result["reward_extra_info"]["response_length"] = float(final["attention_mask"][-response_width:].sum())
        return result
