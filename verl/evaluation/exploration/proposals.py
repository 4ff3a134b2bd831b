"""Proposals for a tree's keys, from plain samples of the model: `register_proposal` in a method's `proposal.py`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from verl.evaluation.exploration.table import Group


class Proposal(NamedTuple):
    """Keys under actor_rollout_ref.rollout with their values, and their expected effect in words."""

    values: dict[str, float | str]
    expected: str

    def line(self) -> str:
        """Return the Hydra overrides that set the keys."""
        return " ".join(f"actor_rollout_ref.rollout.{key}={value}" for key, value in self.values.items())


class Proposed(NamedTuple):
    """A proposal, the groups that were grown with it, and the seconds that this took."""

    proposal: Proposal
    groups: list[Group]
    seconds: float


class Samples(NamedTuple):
    """Plain samples of a diagnosis."""

    n: int  # number of trajectories of a prompt
    rollout: Any  # section `actor_rollout_ref.rollout` of the tree's config
    coldest: Sequence[Group]  # groups at the lowest temperature
    usual: Sequence[Group]  # groups at the temperature nearest to the run's


# grows groups with a proposal's values, and returns them with the seconds that this took
Grow = Callable[[Proposal], Awaitable[tuple[list[Group], float]]]
# a registered proposal; it returns None if the samples say nothing about the tree's keys
Propose = Callable[[Samples, Grow], Awaitable[Proposed | None]]
