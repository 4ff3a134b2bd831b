"""A `gymnasium` environment of texts."""

import gymnasium

from tests.workers.rollout.gym.games import Sums


class GymnasiumSums(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        self.sums = Sums()
        return self.sums.reset(options, seed), {}

    def step(self, action):
        observation, reward, done = self.sums.step(action)
        return observation, reward, done, False, {}
