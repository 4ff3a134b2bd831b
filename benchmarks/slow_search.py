"""A search that takes as long as one over a network, so that methods can be trained at equal latency."""

import asyncio
import math
import random
from dataclasses import dataclass, field

from verl.workers.rollout.tools.base_tool import ToolOutput
from verl.workers.rollout.tools.search.tool import LocalSearchTool

# Hydra override that makes a run with local tools use the slow search
SLOW_SEARCH = "actor_rollout_ref.rollout.tools.tool_instances.search.class_path=benchmarks.slow_search.SlowSearchTool"


@dataclass(kw_only=True, eq=False, repr=False)
class SlowSearchTool(LocalSearchTool):
    """A `LocalSearchTool` with a log-normal delay before every call.

    Args:
        median: median delay in seconds.
        sigma: standard deviation of the delay's logarithm; with 1.0 one call in twenty takes five medians or more.
        seed: seed of the delays. The order of the calls decides which call gets which delay; answers do not change.
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
