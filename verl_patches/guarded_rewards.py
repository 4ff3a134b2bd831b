"""Turns a reward function's exit or non-finite result into the failure of its group alone, and ends a run whose reward
function returns a name with values of several kinds.

verl 0.9.1 awaits the function in a task. If it raises SystemExit, the worker's event loop ends and computes no more
rewards; if it returns NaN, verl trains on it; if `acc` is a text, validation has no accuracy, and if it is a text here
and a number there, validation fails. This can go when upstream checks for all of them.
"""

import asyncio
import functools
import inspect
import numbers
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl.utils.fault_reports import report_fault
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
        try:
            check_info(result.get("reward_extra_info") or {}, self.__dict__.setdefault("info_seen", {}))
        except ValueError as error:
            report_fault(str(error))  # other groups may not fail by it, and would be compared by other values
            raise
        return result

    worker._init_reward_fn, worker.compute_score = init_and_check, compute_score


def check_info(info: dict[str, Any], seen: dict[str, Any]) -> None:
    """Raise ValueError if `acc` is not a finite number, or if a value is of another kind than the first of its name in
    `seen`, to which new names are added; None stands for a value that is missing."""
    if "acc" in info:
        finite_number(info["acc"], "the reward function's acc")
    for name, value in info.items():
        if value is not None and _kind(first := seen.setdefault(name, value)) != _kind(value):
            raise ValueError(f"the reward function's {name} is {first!r} for one response and {value!r} for another")


def _kind(value: Any) -> str:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    return "number" if isinstance(value, numbers.Real) else type(value).__name__


def checked(function: Callable) -> Callable:
    """Return the reward function, or coroutine function, with a check that the reward is a finite number: its result,
    or the result's key `score`."""

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
