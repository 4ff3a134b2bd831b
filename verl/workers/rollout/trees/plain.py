"""Independent trajectories, `tree=plain`: what GRPO trains on, and what every recipe validates with."""

import random

from verl.workers.rollout.growth import BranchPolicy, Growth, Path
from verl.workers.rollout.rollout_engine import gather_or_cancel


class Policy(BranchPolicy):
    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        return cls()

    async def grow(self, growth: Growth, n: int) -> None:
        seeds = random.Random(growth.seed)
        samples = await gather_or_cancel(*(growth.finish(Path(), seeds.getrandbits(31)) for _ in range(n)))
        growth.tree.leaves = [growth.tree.insert(None, segments) for segments in samples]
