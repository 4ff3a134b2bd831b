"""EPTree of TreeRL (arXiv 2506.11902): trajectories that fork at the tokens where the model was least sure.

    M trajectories start from the prompt; each begins a tree
    L times in each tree: the N tokens with the highest entropy are sampled again T times each, and continued to the end

That gives M (1 + N L T) trajectories. Only tokens that the model wrote fork, each in one round at most; end tokens and
the last few tokens of a trajectory never fork. Where a tree has fewer than N other tokens, the prompt is continued.
"""

import math
from collections.abc import Callable, Container
from heapq import nlargest
from statistics import fmean
from typing import NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.parts import register_tree
from verl.workers.config.keys import ROLLOUT, STRICT, check_log_probs
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.trajectory_tree import Segment, common_prefix, first_tokens
from verl.workers.rollout.tree_builder import BranchPolicy, Path, TreeBuilder, derived_seed


@dataclass(frozen=True, config=STRICT)
class EPTreeKeys:
    """Keys under actor_rollout_ref.rollout.custom.eptree.

    Args:
        M: number of trajectories that start from the prompt.
        N: number of tokens that fork in each tree and round.
        L: number of rounds.
        T: number of new trajectories from each of these tokens.
        exclude_last: number of tokens at the end of a trajectory that do not fork.
        entropy_top_k: number of most likely tokens from which a token's entropy is estimated.
    """

    M: int = Field(default=6, ge=1)
    N: int = Field(default=2, ge=1)
    L: int = Field(default=1, ge=0)
    T: int = Field(default=2, ge=1)
    exclude_last: int = Field(default=4, ge=0)
    entropy_top_k: int = Field(default=20, ge=1)


class Trajectory(NamedTuple):
    """A trajectory's segments, and the entropy of each of their tokens in nats; -inf for a tool's tokens."""

    segments: list[Segment]
    entropies: list[float]

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]


PROMPT = Trajectory([], [])


@register_tree(
    "eptree",
    "EPTree of TreeRL (arXiv 2506.11902): trajectories fork at the tokens where the model was least sure",
    keys=EPTreeKeys,
    trajectories=lambda keys: keys.M * (1 + keys.N * keys.L * keys.T),
    formula="M (1 + N L T)",
    smallest={"M": 2, "N": 1},
    scaled_by="M",
    diagnosis={"N": 3, "T": 1},
)
class Policy(BranchPolicy):
    """The policy of `tree=eptree`."""

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        keys = cls.part.read(config)
        check_log_probs(config.actor_rollout_ref.rollout, f"{ROLLOUT}.custom.eptree.entropy_top_k", keys.entropy_top_k)
        return cls(keys)

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        grown = await gather_or_cancel(*(self._tree(builder, number) for number in range(self.keys.M)))
        trajectories = [trajectory for tree, _ in grown for trajectory in tree]
        entropies = [entropy for _, tree_entropies in grown for entropy in tree_entropies]
        builder.tree.leaves = [builder.tree.insert(None, trajectory.segments) for trajectory in trajectories]
        builder.tree.metrics = {
            "shared_tokens": builder.tree.shared_tokens(),
            "forked_tokens": float(len(entropies)),
            "fork_entropy": fmean(entropies or [0.0]),
        }

    async def _tree(self, builder: TreeBuilder, number: int) -> tuple[list[Trajectory], list[float]]:
        """Grow one tree; return its trajectories, and the entropies of the tokens that forked."""
        tree = [await self._continue(builder, PROMPT, (number,))]
        forked: dict[tuple[int, int], float] = {}
        for round_number in range(self.keys.L):
            chosen = self._choose(tree, forked, builder.is_end)
            forked |= chosen
            heads = [Trajectory(first_tokens(tree[i].segments, at), tree[i].entropies[:at]) for i, at in chosen]
            heads += [PROMPT] * (self.keys.N - len(heads))
            keys = [(head, (number, round_number, i, t)) for i, head in enumerate(heads) for t in range(self.keys.T)]
            tree += await gather_or_cancel(*(self._continue(builder, head, key) for head, key in keys))
        return tree, list(forked.values())

    async def _continue(self, builder: TreeBuilder, head: Trajectory, key: tuple) -> Trajectory:
        """Return a trajectory that begins with `head`; `key` identifies it in the seed."""
        seed = derived_seed(builder.seed, key)
        rest = await builder.finish(Path.of(head.segments), seed, n_entropy=self.keys.entropy_top_k)
        entropies = [e for s in rest for e in s.info.entropies or [-math.inf] * len(s.token_ids)]
        for segment in rest:
            segment.info.entropies = None
        return Trajectory([*head.segments, *rest], [*head.entropies, *entropies])

    def _choose(self, tree: list[Trajectory], forked: Container, is_end: Callable[[int], bool]) -> dict:
        """Return the tokens that fork next: (trajectory's index, number of tokens before it) -> entropy."""
        tokens = {}
        for i, trajectory in enumerate(tree):
            ids = trajectory.tokens
            # Up to the first token that differs from an earlier trajectory, both have the same distributions.
            first = 1 + max(common_prefix(ids, earlier.tokens) for earlier in tree[:i]) if i else 0
            for at in range(first, len(ids) - self.keys.exclude_last):
                if trajectory.entropies[at] > -math.inf and not is_end(ids[at]) and (i, at) not in forked:
                    tokens[i, at] = trajectory.entropies[at]
        return dict(nlargest(self.keys.N, tokens.items(), key=lambda item: item[1]))
