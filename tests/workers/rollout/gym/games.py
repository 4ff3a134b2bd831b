"""Small environments for tests."""

import asyncio
import os
import random
import time


class Sums:
    """Counts up to task["goal"]: an action is a number to add; the reward is 1 at the goal. Some actions do harm."""

    def reset(self, task, seed):
        self.goal, self.sum = task["goal"], 0
        return f"goal {self.goal}, seed {seed}"

    def step(self, action):
        if action == "hang":
            time.sleep(60)
        if action == "exit":
            os._exit(3)
        if action == "wrong":
            return "no tuple"
        self.sum += int(action)
        return f"sum {self.sum}", float(self.sum == self.goal), self.sum >= self.goal


class CopiedSums(Sums):
    def copy(self):
        other = type(self)()
        other.goal, other.sum = self.goal, self.sum
        return other


class AsyncSums(Sums):
    """Waits in each step for what it has begun in `reset`, as a connection's reader does."""

    async def reset(self, task, seed):
        self.actions, self.reader = asyncio.Queue(), asyncio.create_task(asyncio.sleep(3600))
        return super().reset(task, seed)

    async def step(self, action):
        asyncio.get_running_loop().call_soon(self.actions.put_nowait, action)
        await asyncio.wait([self.reader], timeout=0)
        return super().step(await self.actions.get())


class Halves(Sums):
    """Every action is rewarded."""

    def step(self, action):
        observation, reward, done = super().step(action)
        return observation, 2 * reward or 0.5, done


class NoStep:
    def reset(self, task, seed):
        return ""


class Hostile(Sums):
    def reset(self, task, seed):
        super().reset(task, seed)
        return task["say"]


class Random(Sums):
    """Does not use its seed."""

    def reset(self, task, seed):
        return super().reset(task, random.random())


class SharedCopies(Sums):
    """The copies share a list with the original."""

    def reset(self, task, seed):
        self.actions = []
        return ""

    def step(self, action):
        self.actions.append(action)
        return " ".join(self.actions), 0.0, False

    def copy(self):
        other = type(self)()
        other.actions = self.actions
        return other
