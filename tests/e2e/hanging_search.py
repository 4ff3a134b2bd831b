"""A search that never answers one name."""

import asyncio

from verl.workers.rollout.tools.search.tool import LocalSearchTool


class HangingSearch(LocalSearchTool):
    def __init__(self, hangs_on: str, **options):
        super().__init__(**options)
        self.hangs_on = hangs_on

    async def execute(self, content, *, timeout):
        if content == self.hangs_on:
            await asyncio.sleep(3600)
        return await super().execute(content, timeout=timeout)
