"""DEEP-GRPO (arXiv 2602.14169): failed trajectories are continued again from one of their later steps.

    `chains` main trajectories start from the prompt and are scored
    the first `max_failures` that failed get a pivot each: the prompt, or the end of any step except the last
    `branches` new trajectories go on from each pivot

Where fewer failed, further main trajectories take the branches' places. A trajectory has L nodes; the prompt is node 0.
Node i is drawn with weight P(x) x^gamma, where x = (i + 1) / L and P(x) is the probability that some branch from it is
right. The trainer fits P (recipe/compared/deep_grpo/component.py); it is 1 before the first fit.

Defaults are the published code's (befocuss/Deep-GRPO), except `max_failures`. In that code every failed trajectory
branches, so the number of rows varies; nothing is seeded; and a step ends either at a full stop or after 50 tokens.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.parts import register_tree
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import TrajectoryTree, add_steps, path_to, split_steps
from verl.workers.rollout.tree_builder import BranchPolicy, Path, TreeBuilder, derived_seed

# A branch's own tokens hold the number of the pivot that they follow, from 1 on; all other tokens hold 0.
PIVOTS = TokenField("deep_grpo_pivot", "algorithm.adv_estimator=deep_grpo", unsent=0, on_demand=True)


class Fit(NamedTuple):
    """P's log-odds, which are linear in x; the trainer sends them with each prompt after the first fit."""

    intercept: float
    slope: float


class Pivots(NamedTuple):
    """The number and the position x of each pivot of a prompt, for the trainer."""

    positions: tuple[tuple[int, float], ...]


@dataclass(frozen=True, config=STRICT)
class DeepGRPOKeys:
    """Keys under actor_rollout_ref.rollout.custom.deep_grpo.

    Args:
        chains: number of main trajectories, which are scored, and branch if they failed.
        max_failures: largest number of main trajectories that branch.
        branches: number of new trajectories from each pivot.
        gamma: exponent of a node's position in its weight.
        window: number of most recent pivots to which P is fitted.
        failure_threshold: largest reward of a failed trajectory.
        step_delimiter: text that ends a step.
        max_step_tokens: largest number of the model's tokens in a step.
    """

    chains: int = Field(default=8, ge=1)
    max_failures: int = Field(default=2, ge=1)
    branches: int = Field(default=8, ge=1)
    gamma: float = Field(default=2.0, ge=0)
    window: int = Field(default=10_000, ge=1)
    failure_threshold: float = 0.0
    step_delimiter: str = Field(default=".", min_length=1)
    max_step_tokens: int = Field(default=50, ge=1)


def pivot_weights(n_nodes: int, gamma: float, fit: Fit | None) -> list[float]:
    """Return P(x) x^gamma of each node except the last; `fit` holds P's log-odds, None for P = 1."""
    intercept, slope = fit or (math.inf, 0.0)
    positions = [(i + 1) / n_nodes for i in range(n_nodes - 1)]
    return [x**gamma / (1 + math.exp(-intercept - slope * x)) for x in positions]


@register_tree(
    "deep_grpo",
    "DEEP-GRPO (arXiv 2602.14169): failed trajectories are continued anew from one of their later steps",
    requires="rewards that are computed during the rollout",
    keys=DeepGRPOKeys,
    trajectories=lambda keys: keys.chains + keys.max_failures * keys.branches,
    formula="chains + max_failures branches",
    smallest={"chains": 2, "max_failures": 2, "branches": 2, "max_step_tokens": 4},
    scaled_by="chains",
    diagnosis={"max_failures": 1, "branches": 3},
    reads_rewards=True,
    learns=True,
)
class Policy(BranchPolicy):
    """The policy of `tree=deep_grpo`; `fit` is the success model's, None before the first."""

    fields = (PIVOTS,)

    def __init__(self, keys: DeepGRPOKeys, text_of: Callable[[int], str], fit: Fit | None = None):
        super().__init__(keys, text_of)
        self.fit = fit

    def for_task(self, task: PromptTask) -> "Policy":
        return Policy(self.keys, self.text_of, task.settings.tree_record(Fit))

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        keys, tree = self.keys, builder.tree
        chains = await gather_or_cancel(*(self._chain(builder, i) for i in range(keys.chains)))
        rewards = await gather_or_cancel(*(builder.reward(chain[-1]) for chain in chains))
        failed = [chain for chain, reward in zip(chains, rewards, strict=True) if reward <= keys.failure_threshold]
        pivots = [self._pivot(builder, *numbered) for numbered in enumerate(failed[: keys.max_failures], 1)]
        others = [self._chain(builder, i) for i in range(keys.chains, n - len(pivots) * keys.branches)]
        branches = [self._branch(builder, *pivot, i) for pivot in pivots for i in range(keys.branches)]
        ends = await gather_or_cancel(*others, *branches)
        tree.leaves = [steps[-1] for steps in [*chains, *ends]]
        tree.metrics = {"failed_chains": float(len(failed)), "shared_tokens": tree.shared_tokens()}

    async def _chain(self, builder: TreeBuilder, number: int) -> list[int]:
        """Grow a main trajectory and return the index of each step's last segment."""
        segments = await builder.finish(Path(), derived_seed(builder.seed, "chain", number))
        steps = split_steps(segments, self.text_of, self.keys.step_delimiter, self.keys.max_step_tokens)
        return add_steps(builder.tree, None, steps)

    def _pivot(self, builder: TreeBuilder, number: int, chain: list[int]) -> tuple[int, int | None, float]:
        """Draw a pivot and return its number, the index of its segment (None for the prompt), and its x."""
        nodes = [None, *chain]
        weights = pivot_weights(len(nodes), self.keys.gamma, self.fit)
        i = random.Random(derived_seed(builder.seed, "pivot", number)).choices(range(len(weights)), weights)[0]
        return number, nodes[i], (i + 1) / len(nodes)

    async def _branch(self, builder: TreeBuilder, pivot: int, at: int | None, x: float, number: int) -> list[int]:
        """Grow a branch and return the index of its last segment, in a list."""
        seed = derived_seed(builder.seed, "branch", pivot, number)
        segments = await builder.finish(path_to(builder.tree, at), seed)
        for segment in segments:
            segment.info.fields[PIVOTS.name] = pivot
            segment.info.record = x
        return add_steps(builder.tree, at, [segments])

    def data_for_trainer(self, tree: TrajectoryTree) -> Pivots:
        on_paths = sorted({i for leaf in tree.leaves for i in tree.path(leaf)})  # the environment may lose branches
        branches = [info for info in (tree.segments[i].info for i in on_paths) if info.record is not None]
        positions = {int(info.fields[PIVOTS.name]): info.record for info in branches}
        return Pivots(tuple(sorted(positions.items())))
