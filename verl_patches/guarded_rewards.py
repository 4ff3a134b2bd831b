"""Turns a reward function's exit or non-finite result into the failure of its group alone.

verl 0.9.1 awaits the function in a task. If it raises SystemExit, the worker's event loop ends and computes no more
rewards; if it returns NaN, verl trains on it. This can go when upstream checks for both.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl.utils.user_code import finite_number, guard_tasks, guarded


def guard_rewards(reward_loop: ModuleType) -> None:
    """Let `RewardLoopWorker` raise an error for rewards that are not finite numbers and for functions that exit."""
    worker = reward_loop.RewardLoopWorker
    init_reward_fn, compute = worker._init_reward_fn, worker.compute_score

    @functools.wraps(init_reward_fn)
    def init_and_check(self):
        init_reward_fn(self)
        if function := getattr(self.reward_manager, "compute_score", None):
            self.reward_manager.compute_score = checked(function)

    @functools.wraps(compute)
    async def compute_score(self, data):
        guard_tasks(asyncio.get_running_loop())
        result = await guarded(compute(self, data), "the reward function")
        finite_number(result["reward_score"], "the reward")  # a reward model's has not been checked yet
        return result

    worker._init_reward_fn, worker.compute_score = init_and_check, compute_score


def checked(function: Callable) -> Callable:
    """Return a function that calls the reward function and checks the reward: its result, or the result's key `score`.

    A coroutine function stays one. The returned function raises ValueError if the reward is not a finite number.
    """

    def check(result: Any, data_source: Any) -> Any:
        score = result.get("score") if isinstance(result, dict) else result
        finite_number(score, f"the reward of a row with data_source={data_source}")
        return result

    @functools.wraps(function)
    def call(*args, **kwargs):
        return check(function(*args, **kwargs), kwargs.get("data_source"))

    @functools.wraps(function)
    async def call_later(*args, **kwargs):
        return check(await function(*args, **kwargs), kwargs.get("data_source"))

    return call_later if inspect.iscoroutinefunction(function) else call
