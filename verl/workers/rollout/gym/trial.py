"""Tries an environment of `environment=gym` before a run: whether it starts, and whether trees can grow in it."""

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from verl.utils.fault_reports import cause_of
from verl.workers.rollout.engines.interface import result_in_thread
from verl.workers.rollout.gym.environment import GymKeys, source_of
from verl.workers.rollout.stateful import CLOSE_SECONDS, Instance, Step, result_in_time

MAX_REFUSALS = 5  # number of failed attempts to start, 1.5 seconds: a server may still be closing the last session


def try_gym(keys: GymKeys, task: Any, actions: Sequence[str] = ()) -> list[Step]:
    """Reset an instance for a task, take actions, and return the steps, the reset's first. With actions, take them
    again in a second instance and in copies of it. Works inside and outside an event loop.

    Raises:
        ValueError: the class or the server does not work, or the second instance or a copy returned something else;
            names the key.
    """
    return result_in_thread(_Trial(keys, task, actions).run())


class _Trial:
    def __init__(self, keys: GymKeys, task: Any, actions: Sequence[str]):
        self.keys, self.task, self.actions, self.source = keys, task, actions, source_of(keys)
        self.key = f"environment.{'class_path' if keys.url is None else 'url'}={keys.class_path or keys.url}"
        self.steps: list[Step] = []
        self.refusals = 0

    async def run(self) -> list[Step]:
        try:
            async with self._instance() as (instance, first):
                self.steps = [first, *await self._played(instance, self.actions)]
            if self.actions:
                await self._take_again()
            return self.steps
        finally:
            await self.source.stop()

    async def _take_again(self) -> None:
        """Compare a second instance with the first one; before each of its actions a copy takes all that follow."""
        who = "a second instance"
        async with self._instance() as (instance, first):
            self._compare(who, [first], 0)
            for i in range(len(self.steps) - 1):
                if self.source.can_copy:
                    copy = await self._call("a copy", instance.copy())
                    try:
                        self._compare("a copy", await self._played(copy, self.actions[i:]), i + 1)
                    finally:
                        await result_in_time(copy.close(), CLOSE_SECONDS)
                    who = "an instance whose copy had taken other actions"
                self._compare(who, await self._played(instance, self.actions[i : i + 1]), i + 1)

    def _compare(self, who: str, steps: Sequence[Step], start: int) -> None:
        for i, (step, expected) in enumerate(zip(steps, self.steps[start:], strict=False), start):
            if step != expected:
                action = f"the action {self.actions[i - 1]!r:.100} (number {i})" if i else "the reset"
                raise ValueError(f"{self.key}: {action} returned {expected}, and in {who} {step}")

    @asynccontextmanager
    async def _instance(self) -> AsyncIterator[tuple[Instance, Step]]:
        instance = self.source.instance(self.task, 0)
        try:
            await instance.prepare(self._refuse)
            yield instance, Step(await self._call(f"reset with the task {self.task!r:.200}", instance.reset()))
        finally:
            await result_in_time(instance.close(), CLOSE_SECONDS)

    async def _played(self, instance: Instance, actions: Sequence[str]) -> list[Step]:
        steps: list[Step] = []
        for action in actions:
            if steps and steps[-1].done:
                break
            steps.append(await self._call(f"the action {action!r:.100}", instance.step(action)))
        return steps

    async def _call(self, what: str, call: Coroutine) -> Any:
        try:
            return await result_in_time(call, self.keys.timeout)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{self.key}: {what} failed: {cause_of(error)}") from error

    def _refuse(self, reason: Exception) -> None:
        self.refusals += 1
        if self.refusals > MAX_REFUSALS:
            raise ValueError(f"{self.key}: {reason}") from reason
