"""A search whose answers take made, long-tailed times: what the measurement of schedules waits for."""

import asyncio
import math
import random

from verl.workers.rollout.tools.search_tool import LocalSearchTool


class SlowSearch(LocalSearchTool):
    """Log-normal seconds, drawn anew for every call.

    Args:
        median, sigma, longest: of the seconds: exp(N(log median, sigma)), at most `longest`.
        seed: of the draws.
    """

    def __init__(self, median: float, sigma: float, longest: float, seed: int = 0, **options):
        super().__init__(**options)
        self.median, self.sigma, self.longest, self.random = median, sigma, longest, random.Random(seed)

    def seconds(self) -> float:
        return min(self.longest, math.exp(self.random.gauss(math.log(self.median), self.sigma)))

    async def execute(self, content, *, timeout):
        await asyncio.sleep(self.seconds())
        return await super().execute(content, timeout=timeout)
