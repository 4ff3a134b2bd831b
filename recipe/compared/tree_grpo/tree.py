"""Tree-GRPO (arXiv 2509.21240): trajectories that are continued from the ends of randomly drawn steps.

    M trajectories start from the prompt; each begins a tree
    L times, in each tree: N ends of steps are drawn, and from each a new trajectory goes on to the end

That gives M (1 + N L) trajectories. A step ends at a tool's result, or without tools at a delimiter; the last step of a
trajectory is not drawn. Where a tree has no other step, the prompt is continued instead, which begins a further tree.
"""

import random

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.parts import register_tree
from verl.workers.config.keys import STRICT
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.environment import NO_ENVIRONMENT
from verl.workers.rollout.trajectory_tree import TOOL, Segment, path_to
from verl.workers.rollout.tree_builder import BranchPolicy, TreeBuilder, derived_seed


@dataclass(frozen=True, config=STRICT)
class TreeGRPOKeys:
    """Keys under actor_rollout_ref.rollout.custom.tree_grpo.

    Args:
        M: trajectories that start from the prompt.
        N: ends of steps that are drawn in each tree and round; the same one may be drawn again.
        L: rounds.
        step_delimiter: the text that ends a step, if there are no tools.
    """

    M: int = Field(default=4, ge=1)
    N: int = Field(default=2, ge=1)
    L: int = Field(default=1, ge=0)
    step_delimiter: str = Field(default="\n\n", min_length=1)


@register_tree(
    "tree_grpo",
    "Tree-GRPO (arXiv 2509.21240): trajectories are continued from the ends of randomly drawn steps",
    keys=TreeGRPOKeys,
    trajectories=lambda keys: keys.M * (1 + keys.N * keys.L),
    formula="M (1 + N L)",
    smallest={"M": 3, "N": 1},
    scaled_by="M",
    diagnosis={"N": 3},
)
class Policy(BranchPolicy):
    """The policy of `tree=tree_grpo`."""

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        trees = await gather_or_cancel(*(self._tree(builder, number) for number in range(self.keys.M)))
        builder.tree.leaves = [leaf for leaves in trees for leaf in leaves]
        builder.tree.metrics = {"shared_tokens": builder.tree.shared_tokens()}

    async def _tree(self, builder: TreeBuilder, number: int) -> list[int]:
        draws = random.Random(derived_seed(builder.seed, number))
        leaves: list[int] = []
        step_ends: list[int] = []
        starts: list[int | None] = [None]
        for _ in range(1 + self.keys.L):
            paths = [path_to(builder.tree, start) for start in starts]
            ends = await gather_or_cancel(*(builder.finish(path, draws.getrandbits(31)) for path in paths))
            leaves += [self._place(builder, *end, step_ends) for end in zip(starts, ends, strict=True)]
            starts = draws.choices(step_ends or [None], k=self.keys.N)
        return leaves

    def _place(self, builder: TreeBuilder, at: int | None, segments: list[Segment], step_ends: list[int]) -> int:
        """Adds segments below `at`, and the index of each that ends a step to `step_ends`; returns the last index."""
        has_tools = builder.environment is not NO_ENVIRONMENT
        parts = segments if has_tools else [part for segment in segments for part in self._steps(segment)]
        for part in parts:
            # trees share nothing but the prompt, even where they begin alike
            at = builder.tree.add(part) if at is None else builder.tree.insert(at, [part])
            if part is not parts[-1] and at not in step_ends and (part.author == TOOL or not has_tools):
                step_ends.append(at)
        return at

    def _steps(self, segment: Segment) -> list[Segment]:
        """A segment in parts; each but perhaps the last ends with the token that completes the delimiter."""
        parts, start, text = [], 0, ""
        for end, token in enumerate(segment.token_ids, 1):
            if self.keys.step_delimiter in (text := text + self.text_of(token)) or end == len(segment.token_ids):
                parts.append(Segment(None, segment.token_ids[start:end], segment.log_probs[start:end]))
                start, text = end, ""
        return parts
