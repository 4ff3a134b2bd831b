"""DAPO's filter of groups whose rewards are equal, and the rounding of their standard deviation."""

import numpy

from verl.trainer.ppo.v1 import replay_buffer


def test_equal_rewards_have_no_spread():
    rewards = [0.9] * 7
    assert numpy.std(rewards) > 0, "numpy's rounding is why the patch exists"
    assert replay_buffer.np.std(rewards) == 0.0


def test_other_rewards_have_numpys_spread():
    assert replay_buffer.np.std([0.0, 0.25, 1.0]) == numpy.std([0.0, 0.25, 1.0])
