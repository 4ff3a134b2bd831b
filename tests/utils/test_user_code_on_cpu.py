"""Rewards, policies and tools that users write: exits, and values that are no finite numbers."""

import asyncio

import numpy as np
import pytest
import torch

from verl.utils.user_code import UserCodeExit, finite_number, guarded


async def raising(error: BaseException):
    raise error


@pytest.mark.parametrize("exits", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_an_exit_is_an_error_and_the_event_loop_goes_on(exits):
    first, second = await asyncio.gather(
        *(asyncio.create_task(guarded(call, "the reward")) for call in (raising(exits), asyncio.sleep(0, "fine"))),
        return_exceptions=True,
    )
    assert isinstance(first, UserCodeExit) and str(first) == f"the reward raised {exits!r}" and second == "fine"


@pytest.mark.parametrize("error", [ValueError("x"), asyncio.CancelledError()])
def test_other_errors_are_its_own(error):
    with pytest.raises(type(error)):
        asyncio.run(guarded(raising(error), "the reward"))


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(2), np.array(0.25), torch.tensor(0.5)])
def test_numbers(value):
    assert finite_number(value, "the reward") == float(value)


@pytest.mark.parametrize(
    "value", [None, "1.0", b"1", [1.0], float("nan"), float("inf"), np.float32("nan"), torch.tensor([1.0]), 1j, {}]
)
def test_other_values_are_named(value):
    with pytest.raises(ValueError, match="the reward is .*, expected a finite number"):
        finite_number(value, "the reward")
