"""Lets DAPO's filter find groups of equal rewards whose computed standard deviation is a rounding error above 0.

verl 0.9.1 tests `np.std(values) == 0.0`, but the deviation of 7 rewards of 0.9 is 1e-16: such groups are kept, and
train on noise. This can go when upstream compares the values themselves.
"""

from types import ModuleType

import numpy


class ExactSpread:
    """A stand-in for numpy whose `std` of equal values is exactly 0."""

    def __getattr__(self, name: str):
        return getattr(numpy, name)

    @staticmethod
    def std(values) -> float:
        """Return numpy's standard deviation of a list; exactly 0 if all values are equal."""
        return 0.0 if min(values) == max(values) else float(numpy.std(values))


def find_equal_rewards(replay_buffer: ModuleType) -> None:
    """Replace `np` in `verl.trainer.ppo.v1.replay_buffer`, which calls `std` only to find groups of equal rewards."""
    replay_buffer.np = ExactSpread()
