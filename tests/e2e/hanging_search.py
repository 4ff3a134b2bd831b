"""A search that never answers the first request for one name, whichever worker gets it."""

import asyncio
from contextlib import suppress
from pathlib import Path

from verl.workers.rollout.tools.search.tool import LocalSearchTool


class HangingSearch(LocalSearchTool):
    def __init__(self, hangs_on: str, asked: str, **options):
        super().__init__(**options)
        self.hangs_on, self.asked = hangs_on, Path(asked)

    async def execute(self, content, *, timeout):
        if content == self.hangs_on:
            with suppress(FileExistsError):
                self.asked.touch(exist_ok=False)
                await asyncio.sleep(3600)
        return await super().execute(content, timeout=timeout)
