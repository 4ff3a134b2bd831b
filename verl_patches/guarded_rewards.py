"""Turns a reward function's exit or non-finite result into the failure of its group alone, and ends a run whose reward
function returns an `acc` that is no finite number.

verl 0.9.1 awaits the function in a task. If it raises SystemExit, the worker's event loop ends and computes no more
rewards; if it returns NaN, verl trains on it; if `acc` is a text, validation has no accuracy. This can go when upstream
checks for all of them.
"""

import asyncio
import functools
from types import ModuleType

from verl.utils.fault_reports import report_fault
from verl.utils.user_code import finite_number, guard_tasks, guarded


def guard_rewards(reward_loop: ModuleType) -> None:
    """Let `RewardLoopWorker` raise an error for rewards that are not finite numbers and for functions that exit."""
    worker = reward_loop.RewardLoopWorker
    compute = worker.compute_score

    @functools.wraps(compute)
    async def compute_score(self, data):
        guard_tasks(asyncio.get_running_loop())
        result = await guarded(compute(self, data), "the reward function")
        sources = data.non_tensor_batch.get("data_source", [None])
        finite_number(result["reward_score"], f"the reward of a row with data_source={sources[-1]}")
        info = result.get("reward_extra_info") or {}
        if "acc" in info:
            try:
                finite_number(info["acc"], "the reward function's acc")
            except ValueError as error:
                report_fault(str(error))  # other groups may not fail by it, and would be compared by other values
                raise
        return result

    worker.compute_score = compute_score
