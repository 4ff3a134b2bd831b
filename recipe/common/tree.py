"""Independent trajectories, `tree=plain`: GRPO trains on them, and every recipe validates with them."""

import random

from verl.utils.parts import register_tree
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.tree_builder import BranchPolicy, Path, TreeBuilder


@register_tree("plain", "Independent responses")
class Policy(BranchPolicy):
    async def grow(self, builder: TreeBuilder, n: int) -> None:
        seeds = random.Random(builder.seed)
        samples = await gather_or_cancel(*(builder.finish(Path(), seeds.getrandbits(31)) for _ in range(n)))
        builder.tree.leaves = [builder.tree.insert(None, segments) for segments in samples]
