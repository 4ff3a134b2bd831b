"""Environments whose states are not values: live instances, which are stepped, copied, or brought back by replay.

    State            the actions since the first state, and what each of them returned
    live instance    belongs to the first branch that continues from its state: a plain trajectory costs nothing more
    copy             another branch's instance, where instances can copy themselves
    replay           else: a fresh instance takes the recorded actions again; if it returns anything else than recorded,
                     the branch is lost

A live instance is a cache of its state: one that is not inside a call may be taken away, and is brought back by replay.
So a worker holds at most `environment.max_instances`, and nothing that waits for an instance holds another.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass

from verl.utils.fault_reports import RunError, cause_of
from verl.utils.user_code import finite_number
from verl.workers.config.keys import STRICT
from verl.workers.rollout.contexts import ContextKeys
from verl.workers.rollout.environment import BranchLost, Environment

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_SECONDS = 10.0  # time limit for an instance to close
MIN_REPLAYS = 20  # number of replays of a worker from which on their differences can end the run
MAX_DIFFERING = 0.1  # largest share of replays that may differ


@keys_dataclass(frozen=True, config=STRICT)
class InstanceKeys(ContextKeys):
    """Keys under `environment` of environments with live instances (recipe/common/config/environment)."""

    max_instances: int = Field(default=64, ge=1)
    timeout: float = Field(default=60.0, gt=0)


@dataclass(frozen=True)
class Step:
    """The result of an action; replays compare the observation. Of a reset only the observation is used."""

    observation: Any
    reward: float | None = None
    done: bool = False


COUNTED = ("instances", "copies", "replays", "replayed_actions", "replay_differs", "failures")


class InstanceLost(RuntimeError):
    """An instance has ended for an outside reason, such as the end of a server. Another is brought to its state."""


class Instance(ABC):
    """A live instance of an environment. One call at a time reaches it, and none after `close`."""

    # whether an idle instance has ended
    is_lost: bool = False

    @property
    def one_call(self) -> AbstractAsyncContextManager:
        """Held during a call. What several instances share lets calls wait for each other outside their time limits."""
        return nullcontext()

    async def prepare(  # noqa: B027 (nothing to wait for, for many environments)
        self, make_room: Callable[[Exception], None]
    ) -> None:
        """Wait before `reset` for what all instances share, such as the start of a server; it limits its own time,
        except for a place on a full server. `make_room` closes an idle instance of the worker, given the reason why
        this one finds no place."""

    @abstractmethod
    async def reset(self, recorded: Any = None) -> Any:
        """Begin, in the same state in every instance of a prompt, and return the first observation; called once. In a
        replay, `recorded` is what another instance returned."""

    @abstractmethod
    async def step(self, action: Any, recorded: Step | None = None) -> Step:
        """Take an action. An exception loses the branch. In a replay, `recorded` is what another instance returned."""

    async def copy(self) -> "Instance":
        """Return an independent instance in the same state; only called if the environment `can_copy`."""
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None:
        """End the instance, also in the middle of a call, which the caller has then given up."""


@dataclass(frozen=True, eq=False)
class State:
    """A state as a value: what was before the action, the action and its result; the first state's is the reset's. Two
    states are equal only if they are the same object."""

    before: "State | None"
    action: Hashable
    step: Step

    def path(self) -> list["State"]:
        """Return the states after each action since the first state, this one last."""
        states, at = [], self
        while at.before is not None:
            states.append(at)
            at = at.before
        return states[::-1]


class InstancePool:
    """The live instances of a rollout worker, for all prompts. An instance is inside a call, or idle. A new instance
    needs a place. Where all are taken, the instance that has been idle for the longest time is closed, but with
    `keeps_idle`; where all are inside calls, whose time is limited, the first that becomes idle."""

    def __init__(self, keys: InstanceKeys, keeps_idle: bool = False):
        self.keys, self.keeps_idle, self.replays, self.differing = keys, keeps_idle, 0, 0
        self._places = asyncio.Semaphore(keys.max_instances)
        # numbers of places that are taken, of calls that wait for a place, and of places that are about to be free
        self.used, self._waiting, self._closing = 0, 0, 0
        # the idle instances by their states, the one that has been idle for the longest time first
        self.idle: OrderedDict[State, tuple[StatefulEnvironment, Instance]] = OrderedDict()

    async def take_place(self) -> None:
        """Wait for a place."""
        self._waiting += 1
        self._close_idle()
        try:
            await self._places.acquire()
            self.used += 1
        finally:
            self._waiting -= 1

    def free_place(self) -> None:
        self.used -= 1
        self._places.release()

    def make_room(self, reason: Exception) -> None:
        """Close the instance that has been idle for the longest time; only a trial tells the reason."""
        if self.idle:
            self._close_longest_idle()

    def has_room(self) -> bool:
        """Return whether there is more than one place, and a new instance need not wait for a call to end."""
        is_free = self.used < self.keys.max_instances or len(self.idle) > 1
        return self.keys.max_instances > 1 and is_free and not self._waiting

    def keep(self, state: State, owner: "StatefulEnvironment", instance: Instance) -> None:
        """Keep an idle instance for the next branch that continues from its state."""
        self.idle[state] = owner, instance
        self._close_idle()

    def close(self, instance: Instance) -> asyncio.Task:
        """Close an instance in the background, and free its place."""
        self._closing += 1
        return asyncio.ensure_future(self._close(instance))

    async def _close(self, instance: Instance) -> None:
        try:
            await result_in_time(instance.close(), CLOSE_SECONDS)
        except Exception as error:
            logger.warning(f"an instance of the environment did not close: {cause_of(error)}")
        finally:
            self._closing -= 1
            self.free_place()

    def count_replay(self, differs: bool) -> None:
        """Count a replay; raise RunError if more than a tenth of the replays differed from what was recorded."""
        self.replays, self.differing = self.replays + 1, self.differing + differs
        if differs and self.replays >= MIN_REPLAYS and self.differing > MAX_DIFFERING * self.replays:
            raise RunError(
                f"{self.differing} of {self.replays} replays of the environment differed from what was recorded: its "
                "steps must follow from the seed and the actions alone; choose tree=plain for it, or let it copy itself"
            )

    def _close_idle(self) -> None:
        """Close idle instances while more wait for places than there are free, or about to be."""
        while self.idle and not self.keeps_idle and self._waiting > self._closing + self.keys.max_instances - self.used:
            self._close_longest_idle()

    def _close_longest_idle(self) -> None:
        _, (owner, instance) = self.idle.popitem(last=False)
        owner.end(instance)


class StatefulEnvironment(Environment):
    """Base class of environments with live instances; an object serves one prompt. A subclass writes `create`, and
    `Environment.answer` by `advance`."""

    # whether instances can copy themselves
    can_copy: bool = False

    def __init__(self, pool: InstancePool):
        self.pool = pool
        self.seconds: float | None = pool.keys.timeout  # time limit of an instance's call; None for no limit
        self.counts = Counter(dict.fromkeys(COUNTED, 0))
        self._first: State | None = None
        self._closed = False
        self._continued: set[State] = set()  # states from which some branch has continued
        self._locks: defaultdict[State, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: dict[Hashable, asyncio.Task] = {}
        self._closing: set[asyncio.Task] = set()

    def create(self) -> Instance:
        """Return a new instance, which is reset next."""
        raise NotImplementedError

    def is_same(self, step: Step, recorded: Step) -> bool:
        """Return whether a replayed step returned what was recorded."""
        return step == recorded

    async def first_state(self) -> State:
        """Return the prompt's first state. The instance that is reset for it goes to the first branch."""
        return await self._shared(None, self._make_first)

    async def advance(self, state: State | None, action: Hashable) -> State:
        """Return the state after an action; None stands for the first one. The same state and action give the same
        object. Raise BranchLost if the state could not be reached again, or the step failed."""
        before = state or await self.first_state()
        return await self._shared((before, action), partial(self._step, before, action))

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        for state in [state for state, (owner, _) in self.pool.idle.items() if owner is self]:
            self._end_idle(state)

        async def ended() -> None:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await asyncio.gather(*self._closing)

        await asyncio.shield(asyncio.ensure_future(ended()))

    def release(self, state: State | None) -> None:
        if self.pool.keeps_idle and state is not None:
            self._end_idle(state)

    def metrics(self, calls: Sequence[dict]) -> dict[str, float]:
        return {f"environment/{name}": float(value) for name, value in self.counts.items()}

    # ---- one state after another ----

    async def _shared(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, State]]) -> State:
        """Return what `make` returns. It runs once for all that ask for the same key, and on if one is cancelled."""
        if self._closed:
            raise RuntimeError("this prompt's environment is closed")
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(make())
        return await asyncio.shield(self._tasks[key])

    async def _make_first(self) -> State:
        await self.pool.take_place()
        try:
            instance, observation = await self._fresh()
        except BranchLost as error:
            if not isinstance(error.__cause__, InstanceLost):
                raise
            await self.pool.take_place()
            instance, observation = await self._fresh()
        self._first = State(None, None, Step(observation))
        self._keep(self._first, instance)
        return self._first

    async def _step(self, before: State, action: Hashable) -> State:
        try:
            instance = await self._instance_at(before)
            step = await self._call("step", partial(instance.step, action), instance)
        except BranchLost as error:
            if not isinstance(error.__cause__, InstanceLost):
                raise
            await self.pool.take_place()
            instance = await self._replayed(before)
            step = await self._call("step", partial(instance.step, action), instance)
        try:
            if step.reward is not None:
                finite_number(step.reward, "the reward of a step")
        except ValueError as error:
            self.end(instance)
            self.counts["failures"] += 1
            raise BranchLost(f"a step of the environment failed: {cause_of(error)}") from error
        state = State(before, action, step)
        if step.done:
            self.end(instance)
        else:
            self._keep(state, instance)
        return state

    # ---- live first, then copies, then replays ----

    async def _instance_at(self, state: State) -> Instance:
        """Return an instance in a state, for the caller to step."""
        is_first = state not in self._continued
        self._continued.add(state)
        if is_first and (instance := self._take_idle(state)) is not None:
            return instance
        if is_first or not self.can_copy:
            await self.pool.take_place()
            return await self._replayed(state)
        async with self._locks[state]:  # branches of one state copy the same instance, one after another
            if state not in self.pool.idle and self.pool.has_room():
                await self.pool.take_place()
                self._keep(state, await self._replayed(state))
            if state in self.pool.idle:
                self.pool.idle.move_to_end(state)  # all others are closed before it
            await self.pool.take_place()
            if (kept := self._take_idle(state)) is not None:
                with contextlib.suppress(BranchLost):
                    copy = await self._copied(kept)
                    self._keep(state, kept)
                    return copy
                await self.pool.take_place()
            return await self._replayed(state)

    async def _copied(self, instance: Instance) -> Instance:
        """Return a copy, for which a place has been taken; if it fails, the place is free and the instance closed."""
        made: list[Instance] = []
        given_up = False

        async def copy() -> Instance:
            made.append(await instance.copy())
            if given_up:  # the copy has ignored its cancellation
                await made[0].close()
            return made[0]

        try:
            copied = await self._call("copy", copy, instance)
        except BaseException:
            given_up = True
            if made:
                self.end(made[0])
            else:
                self.pool.free_place()
            raise
        self.counts["copies"] += 1
        return copied

    async def _replayed(self, state: State) -> Instance:
        """Return a fresh instance that has taken a state's actions again, for which a place has been taken."""
        actions = state.path()
        instance, observation = await self._fresh(self._first.step.observation)
        differs = not self.is_same(Step(observation), self._first.step)
        for recorded in actions:
            if differs:
                break
            step = await self._call("step", partial(instance.step, recorded.action, recorded.step), instance)
            self.counts["replayed_actions"] += 1
            differs = not self.is_same(step, recorded.step)
        if actions or differs:
            self.counts["replays"] += 1
            self.counts["replay_differs"] += differs
        if differs:
            self.end(instance)
        self.pool.count_replay(differs)
        if differs:
            raise BranchLost(f"a replay of {len(actions)} actions returned something else than was recorded")
        return instance

    async def _fresh(self, recorded: Any = None) -> tuple[Instance, Any]:
        """Return a new instance, for which a place has been taken, and its first observation; see `Instance.reset`."""
        try:
            instance = self.create()
            await instance.prepare(self.pool.make_room)
        except asyncio.CancelledError:
            self.pool.free_place()
            raise
        except Exception as error:
            self.pool.free_place()
            self.counts["failures"] += 1
            raise BranchLost(f"the environment could not be made: {cause_of(error)}") from error
        self.counts["instances"] += 1
        return instance, await self._call("reset", partial(instance.reset, recorded), instance)

    # ---- instances ----

    def _take_idle(self, state: State) -> Instance | None:
        """Return the idle instance of a state, which is no longer idle; None if there is none, or it has ended."""
        _, instance = self.pool.idle.pop(state, (self, None))
        if instance is not None and instance.is_lost:
            self.end(instance)
            return None
        return instance

    def _end_idle(self, state: State) -> None:
        if (instance := self._take_idle(state)) is not None:
            self.end(instance)

    def _keep(self, state: State, instance: Instance) -> None:
        if self._closed or state in self.pool.idle:
            self.end(instance)
        else:
            self.pool.keep(state, self, instance)

    def end(self, instance: Instance) -> None:
        """Close an instance in the background; `close` waits for it."""
        task = self.pool.close(instance)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _call(self, what: str, call: Callable[[], Coroutine[Any, Any, T]], instance: Instance) -> T:
        """Return the result of an instance's call. If it fails or takes too long, close it and raise BranchLost."""
        try:
            async with instance.one_call:
                return await result_in_time(call(), self.seconds)
        except Exception as error:
            self.end(instance)
            self.counts["failures"] += 1
            raise BranchLost(f"a {what} of the environment failed: {cause_of(error)}") from error
        except asyncio.CancelledError:
            self.end(instance)
            raise


async def result_in_time(call: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Return a coroutine's result; raise TimeoutError after the time limit, without waiting for its cancellation."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may ask for it
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError(f"no answer in {seconds:g} seconds")
        return task.result()
    finally:
        task.cancel()
