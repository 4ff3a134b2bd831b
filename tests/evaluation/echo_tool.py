"""A tool that says what it was asked."""

from verl.workers.rollout.tools.base_tool import BaseTool


class Echo(BaseTool):
    name, trigger_tag = "search", "search"
    closed = 0

    async def execute(self, content: str, *, timeout: float) -> str:
        return f"you asked: {content}"

    async def close(self) -> None:
        Echo.closed += 1
