"""A model of the gain of asynchronous schedules: groups that do not slow each other down, and pauses for updates.

A group writes and calls tools in turn, and its time does not depend on other groups. A step ends when a batch of groups
has ended, oldest first, and the policy has been updated:

    sync              waits for a batch's slowest group, then updates
    colocate_async    (1 + ahead) batches are under way; waits for a batch of groups, then updates, and writing pauses
    separate_async    the same, but writing goes on during the update, which is slower: it has a share of the GPUs

The model ignores that groups on one GPU slow each other down. It holds where the longest response or the slowest tool
determines the time, and not where the GPUs are full anyway.
"""

import math
import random
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Workload:
    """The sizes of a run's parts, and their times in seconds.

    Args:
        batch: number of groups in a step.
        trajectories: number of trajectories in a group; the group ends with its last one.
        calls: number of tool calls in a trajectory, one after another.
        writing: seconds in which the model generates tokens before each call, and after the last.
        median, sigma, longest: parameters of a call's log-normal seconds, which are cut at `longest`.
        update: seconds of an update on all GPUs.
    """

    batch: int = 16
    trajectories: int = 8
    calls: int = 2
    writing: float = 1.0
    median: float = 1.0
    sigma: float = 1.2
    longest: float = 30.0
    update: float = 5.0

    def call(self, rng: random.Random) -> float:
        """Return the seconds of a random call."""
        return min(self.longest, math.exp(rng.gauss(math.log(self.median), self.sigma)))


class Group:
    """Trajectories under way; `left` holds each one's remaining seconds as [writing, call, writing, …]."""

    def __init__(self, workload: Workload, step: int, rng: random.Random):
        self.step, self.left = step, []
        for _ in range(workload.trajectories):
            parts = [workload.writing]
            for _ in range(workload.calls):
                parts += [workload.call(rng), workload.writing]
            self.left.append(parts)

    @property
    def seconds(self) -> float:
        """Return the seconds until the group's end, without a pause."""
        return max(map(sum, self.left))

    def advance(self, seconds: float, writes: bool) -> None:
        """Let `seconds` pass; if `writes` is false, only calls go on."""
        for parts in self.left:
            rest = seconds
            while parts and rest > 0 and (writes or len(parts) % 2 == 0):  # an even number of parts: a call is next
                done = min(rest, parts[0])
                rest -= done
                parts[0] -= done
                if parts[0] <= 1e-12:
                    parts.pop(0)


@dataclass(frozen=True)
class Result:
    """Means over a run's steps.

    Args:
        seconds: mean seconds of a step.
        staleness: mean number of steps from a group's start to its update.
    """

    seconds: float
    staleness: float


def simulate(
    workload: Workload,
    schedule: str,
    ahead: int = 1,
    trainer_share: float = 0.5,
    steps: int = 300,
    seed: int = 0,
    skip: int | None = None,
) -> Result:
    """Simulate a run of `steps` steps and return its means.

    Args:
        ahead: number of batches under way beyond the next one.
        trainer_share: share of the GPUs that the update has with `separate_async`.
        skip: number of first steps that do not count; None: a tenth of all.
    """
    rng, groups, seconds, ages = random.Random(seed), [], [], []

    def begin(n: int, step: int) -> None:
        groups.extend(Group(workload, step, rng) for _ in range(n))

    def advance(duration: float, writes: bool) -> None:
        for group in groups:
            group.advance(duration, writes)

    separate = schedule == "separate_async"
    update = workload.update / trainer_share if separate else workload.update
    begin(0 if schedule == "sync" else ahead * workload.batch, 0)
    for step in range(steps):
        begin(workload.batch, step)
        wait = sorted(group.seconds for group in groups)[workload.batch - 1]
        advance(wait, writes=True)
        ended = [group for group in groups if group.seconds <= 1e-9][: workload.batch]
        for group in ended:
            groups.remove(group)
        advance(update, writes=separate)
        ages += [step - group.step for group in ended]
        seconds.append(wait + update)
    skip = steps // 10 if skip is None else skip
    return Result(fmean(seconds[skip:]), fmean(ages[skip * workload.batch :]))
