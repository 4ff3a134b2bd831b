"""BranPO (arXiv 2602.03719): new tails of trajectories, from a few steps before their ends.

    `bases` trajectories start from the prompt and are scored
    for each that failed a number from 1 to `max_steps_back` is drawn: it gets up to `failed_tries` new tails, all from
    this number of steps before its end
    if more than half but not all are right: each right one with more steps than the right ones have on average gets up
    to `long_tries` new tails, from `long_steps_back` steps before its end

until there are `tails` new ones; further trajectories from the prompt take the places that are left. A step ends at a
tool's result, or without tools at a delimiter. If a base has too few steps, its tails start from the prompt.

Defaults are the published code's (YubaoZhao/BranPO), except `tails`: in that code the number of rows varies. It makes
one tail after another, goes further back while all have the same outcome as the base, and keeps the first that differs.
Tails chosen by outcome are a biased sample of what follows their base, so here all are made at once, and kept.
"""

import random
from collections.abc import Sequence
from statistics import fmean

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.parts import register_tree
from verl.workers.config.keys import STRICT
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.environment import NO_ENVIRONMENT
from verl.workers.rollout.trajectory_tree import add_steps, path_to, split_steps
from verl.workers.rollout.tree_builder import BranchPolicy, TreeBuilder, derived_seed


@dataclass(frozen=True, config=STRICT)
class BranPOKeys:
    """Keys under actor_rollout_ref.rollout.custom.branpo.

    Args:
        bases: number of trajectories from the prompt that are scored.
        tails: number of new tails; further trajectories from the prompt where fewer are needed.
        failed_tries: largest number of new tails of a failed trajectory.
        max_steps_back: largest number of steps that a new tail of a failed trajectory replaces.
        long_tries: largest number of new tails of a right trajectory that is long.
        long_steps_back: number of steps that a new tail of a right trajectory replaces.
        failure_threshold: largest reward of a failed trajectory.
        step_delimiter: text that ends a step where there are no tools.
    """

    bases: int = Field(default=4, ge=1)
    tails: int = Field(default=8, ge=1)
    failed_tries: int = Field(default=2, ge=1)
    max_steps_back: int = Field(default=3, ge=1)
    long_tries: int = Field(default=5, ge=0)
    long_steps_back: int = Field(default=2, ge=1)
    failure_threshold: float = 0.0
    step_delimiter: str = Field(default="\n\n", min_length=1)


def new_tails(keys: BranPOKeys, lengths: Sequence[int], rewards: Sequence[float], seed: int) -> list[tuple[int, int]]:
    """Return for each new tail the index of its base, and the number of the base's steps that it replaces.

    There are at most `tails`, those of failed bases first. All tails of a base replace the same number of steps, which
    may exceed the base's length.
    """
    is_right = [reward > keys.failure_threshold for reward in rewards]
    draws, tails = random.Random(seed), []
    for i in range(len(rewards)):
        steps_back = draws.randint(1, keys.max_steps_back)
        tails += [] if is_right[i] else [(i, steps_back)] * keys.failed_tries
    if 0.5 < fmean(is_right) < 1:
        mean = fmean(length for length, right in zip(lengths, is_right, strict=True) if right)
        long = [i for i, right in enumerate(is_right) if right and lengths[i] > mean]
        tails += [(i, keys.long_steps_back) for i in long for _ in range(keys.long_tries)]
    return tails[: keys.tails]


@register_tree(
    "branpo",
    "BranPO (arXiv 2602.03719): failed trajectories, and long ones of easy prompts, get new tails from a few steps "
    "before their ends",
    requires="rewards that are computed during the rollout",
    keys=BranPOKeys,
    trajectories=lambda keys: keys.bases + keys.tails,
    formula="bases + tails",
    smallest={"bases": 3, "tails": 3, "max_steps_back": 1},
    scaled_by="bases",
    diagnosis={"tails": 3},
    reads_rewards=True,
)
class Policy(BranchPolicy):
    """The policy of `tree=branpo`."""

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        keys, tree = self.keys, builder.tree
        bases = await gather_or_cancel(*(self._continue(builder, None, "base", i) for i in range(keys.bases)))
        rewards = await gather_or_cancel(*(builder.reward(base[-1]) for base in bases))
        tails = new_tails(keys, [len(base) for base in bases], rewards, derived_seed(builder.seed, "steps back"))
        starts = [[None, *bases[i]][max(0, len(bases[i]) - steps_back)] for i, steps_back in tails]
        starts += [None] * (n - len(bases) - len(starts))
        rest = await gather_or_cancel(*(self._continue(builder, at, "tail", i) for i, at in enumerate(starts)))
        tree.leaves = [steps[-1] for steps in [*bases, *rest]]
        tree.metrics = {"new_tails": float(len(tails)), "shared_tokens": tree.shared_tokens()}

    async def _continue(self, builder: TreeBuilder, at: int | None, kind: str, number: int) -> list[int]:
        """Grow a trajectory from a segment's end, or from the prompt; return the last segment of each new step."""
        segments = await builder.finish(path_to(builder.tree, at), derived_seed(builder.seed, kind, number))
        delimiter = self.keys.step_delimiter if builder.environment is NO_ENVIRONMENT else None
        return add_steps(builder.tree, at, split_steps(segments, self.text_of, delimiter))
