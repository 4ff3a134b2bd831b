"""How much an asynchronous schedule gains: a model of groups that wait for themselves alone, and of pauses for updates.

A group writes and calls tools in turn; it takes its own time, whatever the others do. A step ends when a batch of
groups has ended, oldest first, and the policy has been updated:

    sync              the slowest of a batch, then the update
    colocate_async    (1 + ahead) batches are under way; the first batch to end; then the update, and writing pauses
    separate_async    the same; the update goes on beside it, on a share of the GPUs, and is that much slower

What the model leaves out: that groups on one GPU slow each other down. So it holds where the longest response or the
slowest tool decides, and not where the GPUs are full anyway.
"""

import math
import random
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Workload:
    """Seconds of a run's parts.

    Args:
        batch: groups of a step.
        trajectories: of a group; the group ends with its last one.
        calls: of tools, one after another, of a trajectory.
        writing: seconds before each call, and after the last.
        median, sigma, longest: of a call: log-normal, cut.
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
        return min(self.longest, math.exp(rng.gauss(math.log(self.median), self.sigma)))


class Group:
    """Trajectories under way: of each, what is left, as [writing, call, writing, …] seconds."""

    def __init__(self, workload: Workload, step: int, rng: random.Random):
        self.step, self.left = step, []
        for _ in range(workload.trajectories):
            parts = [workload.writing]
            for _ in range(workload.calls):
                parts += [workload.call(rng), workload.writing]
            self.left.append(parts)

    @property
    def seconds(self) -> float:
        """To its end, without a pause."""
        return max(map(sum, self.left))

    def advance(self, seconds: float, writes: bool) -> None:
        """Let time pass; where `writes` is false, only calls go on."""
        for parts in self.left:
            rest = seconds
            while parts and rest > 0 and (writes or len(parts) % 2 == 0):  # an even number is left before a call
                done = min(rest, parts[0])
                rest -= done
                parts[0] -= done
                if parts[0] <= 1e-12:
                    parts.pop(0)


@dataclass(frozen=True)
class Result:
    """Means of a step.

    Args:
        seconds: that it takes.
        staleness: steps from a group's start to its update.
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
    """A run of so many steps.

    Args:
        ahead: batches.
        trainer_share: of the GPUs, with `separate_async`.
        skip: the first steps, which do not count; None: a tenth of all.
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
