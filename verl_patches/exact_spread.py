"""Lets DAPO's filter find groups of equal rewards whose standard deviation is rounding.

verl 0.9.1 asks for `np.std(values) == 0.0`, which is 1e-16 for 7 rewards of 0.9: such groups are kept, and train on
noise. This can go when upstream compares the values themselves.
"""

from types import ModuleType

import numpy


class ExactSpread:
    """numpy, but for `std` of equal values, which is 0."""

    def __getattr__(self, name: str):
        return getattr(numpy, name)

    @staticmethod
    def std(values) -> float:
        """Return numpy's standard deviation of a list; exactly 0 if all values are equal."""
        return 0.0 if min(values) == max(values) else float(numpy.std(values))


def find_equal_rewards(replay_buffer: ModuleType) -> None:
    """Give upstream's module `verl.trainer.ppo.v1.replay_buffer` this `np`; it calls `std` for that test alone."""
    replay_buffer.np = ExactSpread()
