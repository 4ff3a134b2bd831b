"""A search that takes time, as one over a network does: for training at equal latency."""

import asyncio
import math
import random
from dataclasses import dataclass, field

from verl.workers.rollout.tools.base_tool import ToolOutput
from verl.workers.rollout.tools.search_tool import LocalSearchTool

# an override for a run with local tools
SLOW_SEARCH = "actor_rollout_ref.rollout.tools.tool_instances.search.class_path=benchmarks.slow_search.SlowSearchTool"


@dataclass(kw_only=True, eq=False, repr=False)
class SlowSearchTool(LocalSearchTool):
    """`LocalSearchTool`, of which every call takes a log-normal time more.

    Args:
        median: seconds.
        sigma: of the time's logarithm; with 1.0 one call of twenty takes five times the median or more.
        seed: of the times. Which call gets which depends on the calls' order; what they answer does not.
    """

    median: float = 0.2
    sigma: float = 1.0
    seed: int = 0
    _draw: random.Random = field(init=False)

    def __post_init__(self):
        super().__post_init__()
        self._draw = random.Random(self.seed)

    @classmethod
    def check(cls, *args, median: float = 0.2, sigma: float = 1.0, seed: int = 0, **others) -> None:
        super().check(*args, **others)
        if not median > 0 <= sigma:
            raise ValueError(f"expected median above 0 and sigma at least 0; got {median=}, {sigma=}")

    async def execute(self, content: str, *, timeout: float) -> ToolOutput:
        await asyncio.sleep(self._draw.lognormvariate(math.log(self.median), self.sigma))
        return await super().execute(content, timeout=timeout)
