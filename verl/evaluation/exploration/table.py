"""Measures the groups of trajectories that a tree policy grew: a row of the table of scripts/explore.sh.

A group holds the trajectories of a prompt. Every prompt has the same weight. Example: two prompts with four
trajectories each; the first prompt has one right trajectory, the second none:

    accuracy (1/4 + 0) / 2    Pass@4 1/2    mixed 1/2: share of groups with right and wrong answers (GRPO learns there)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from verl.evaluation.scores.metrics import with_interval
from verl.workers.rollout.trajectory_tree import tree_of_rows


class Certainty(NamedTuple):
    """The model's distribution (T = 1) at a token: its entropy in nats, and the two highest probabilities."""

    entropy: float
    first: float
    second: float


@dataclass(frozen=True)
class Trajectory:
    """A response."""

    tokens: Sequence[int]  # including tools' results
    steps: Sequence[Certainty | None]  # the model's distribution at each token; None where a tool wrote the token
    right: bool
    answer: str  # the vote: equal answers are equal text


@dataclass(frozen=True)
class SampledGroup:
    """The trajectories that a policy grew for a prompt."""

    prompt_ids: Sequence[int]
    trajectories: Sequence[Trajectory]
    generated: int  # number of tokens that the engine generated, including those that are in no response
    metrics: Mapping[str, float] = field(default_factory=dict)  # the tree's metrics, as a training run logs them
    max_tokens: float = math.inf  # largest number of tokens of a response


def measure_groups(groups: Sequence[SampledGroup], n: int) -> dict[str, float]:
    """Return a policy's numbers, by name, from one group of at most n trajectories for each prompt.

    They are `accuracy`, `pass@n` and `mixed`, with the ends of their 95 % bootstrap intervals over prompts; the mean
    numbers in a group of different `answers`, different responses (`branches`) and `trajectories`; `entropy`, the mean
    over the model's tokens in nats; `cut`, the share of responses that end at their limit; `tokens`, the mean number
    generated for a prompt; `unique_share`; with tools `tool_calls` for a prompt, where shared calls count once.
    """
    right = [[trajectory.right for trajectory in group.trajectories] for group in groups]
    prompt_values = {
        "accuracy": [fmean(group) for group in right],
        f"pass@{n}": [float(any(group)) for group in right],
        "mixed": [float(any(group) and not all(group)) for group in right],
    }
    numbers: dict[str, float] = {}
    for name, values in prompt_values.items():
        numbers |= with_interval(name, values)
    entropies = [step.entropy for group in groups for row in group.trajectories for step in row.steps if step]
    if all("tool_calls" in group.metrics for group in groups):
        numbers["tool_calls"] = fmean(group.metrics["tool_calls"] for group in groups)
    return numbers | {
        "answers": fmean(len({row.answer for row in group.trajectories}) for group in groups),
        "branches": fmean(len({tuple(row.tokens) for row in group.trajectories}) for group in groups),
        "trajectories": fmean(len(group.trajectories) for group in groups),
        "entropy": fmean(entropies) if entropies else 0.0,
        "cut": fmean(fmean(len(row.tokens) >= group.max_tokens for row in group.trajectories) for group in groups),
        "tokens": fmean(group.generated for group in groups),
        "unique_share": unique_share(groups),
    }


def unique_share(groups: Sequence[SampledGroup]) -> float:
    """Return the share of all rows' tokens, including prompts, that remain when every prefix that rows of a prompt
    share is counted once: the tokens that an update on the prefix tree computes."""
    unique = held = 0
    for group in groups:
        rows = [trajectory.tokens for trajectory in group.trajectories]
        segments = tree_of_rows(group.prompt_ids, rows).segments
        unique += len(group.prompt_ids) + sum(len(segment.token_ids) for segment in segments)
        held += sum(len(group.prompt_ids) + len(row) for row in rows)
    return unique / held


class Proposal(NamedTuple):
    """Keys under actor_rollout_ref.rollout with their values, and their expected effect in words."""

    values: dict[str, float | str]
    expected: str

    def line(self) -> str:
        """Return the Hydra overrides that set the keys."""
        return " ".join(f"actor_rollout_ref.rollout.{key}={value}" for key, value in self.values.items())


class Samples(NamedTuple):
    """Plain samples of a diagnosis."""

    n: int  # number of trajectories of a prompt
    rollout: Any  # section `actor_rollout_ref.rollout` of the tree's config
    coldest: Sequence[SampledGroup]  # groups at the lowest temperature
    usual: Sequence[SampledGroup]  # groups at the temperature nearest to the run's
