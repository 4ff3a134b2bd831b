"""Tools that hold Python's lock or end their process: one of ours, and one of verl's."""

import os
import re
import sys
import time

from verl.tools.base_tool import BaseTool as UpstreamBaseTool
from verl.tools.schemas import ToolResponse

from verl.workers.rollout.tools.base_tool import BaseTool, ToolError


def work(query: str) -> str:
    if query == "backtracks":  # minutes, with the lock held
        re.match("(a|aa)+$", "a" * 60 + "b")
    if query == "sleeps":
        time.sleep(60)
    if query == "dies":
        os.kill(os.getpid(), 9)
    if query == "exits":
        sys.exit(3)
    if query == "bad":
        raise ToolError("no such page", kind="http_404", retry=False)
    print("printed")
    return f"{query} in {os.getpid()}"


class Blocking(BaseTool):
    name = trigger_tag = "block"

    async def execute(self, content, *, timeout):
        return work(content)


class Plain(BaseTool):
    """Its `execute` is no coroutine function."""

    name = trigger_tag = "block"

    def execute(self, content, *, timeout):
        return work(content)


class Upstream(UpstreamBaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=work(parameters["query"])), 0.0, {}


SCHEMA = {
    "type": "function",
    "function": {
        "name": "block",
        "description": "blocks",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
