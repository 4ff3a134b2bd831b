"""An adapter that runs one of verl's own tools (a `verl.tools.base_tool.BaseTool`, verl 0.9.1) as one of ours.

    tool_instances:
      crawl:
        class_path: my_project.tools.CrawlTool
        params: {config: {type: native}, tool_schema: {type: function, function: {name: crawl, …}}}

The tag is the function's name. The text between the tags is a JSON object of the arguments, or plain text if the
function requires one argument, a string. A trajectory's calls are independent: each has its own instance
(verl's `create`, `execute`, `release`). The tool's reward and metrics are not used.
"""

from typing import Any

from omegaconf import OmegaConf
from verl.tools.base_tool import BaseTool as UpstreamBaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl.workers.rollout.tools.base_tool import BaseTool, ToolError
from verl.workers.rollout.tools.function_calls import call_arguments, describe_function
from verl.workers.rollout.tools.plain_text import one_line

LONGEST_MESSAGE = 300  # largest number of characters of an exception's text for the model


def adapted(upstream: Any) -> type[BaseTool] | None:
    """Return one of our tool classes that runs verl's tool class; None for anything else."""
    if not (isinstance(upstream, type) and issubclass(upstream, UpstreamBaseTool)):
        return None
    return type(upstream.__name__, (UpstreamTool,), {"upstream": upstream})


class UpstreamTool(BaseTool):
    """One of verl's tools as one of ours.

    `config` is the config of verl's tool class; `tool_schema` is the function in OpenAI's format, None if the class
    creates it."""

    upstream: type[UpstreamBaseTool]

    def __init__(self, *, config: dict | None = None, tool_schema: dict | None = None):
        self.tool = self.upstream(_plain(config) or {}, _schema_of(tool_schema))
        self.name = self.trigger_tag = self.tool.name
        function = self.tool.tool_schema.function
        self.schema = function.parameters.model_dump(exclude_none=True)
        self.description = describe_function(function.description, self.schema)

    @classmethod
    def check(cls, *, config: dict | None = None, tool_schema: dict | None = None) -> None:
        makes_none = cls.upstream.get_openai_tool_schema is UpstreamBaseTool.get_openai_tool_schema
        if _schema_of(tool_schema) is None and makes_none:
            raise ValueError(f"params.tool_schema is missing, and {cls.upstream.__name__} makes none itself")

    @classmethod
    def tags(cls, **params) -> list[str]:
        return [cls(**params).trigger_tag]

    async def execute(self, content: str, *, timeout: float) -> str:
        arguments = call_arguments(self.schema, content)
        try:
            instance, _ = await self.tool.create(create_kwargs={})
            try:
                response, _, _ = await self.tool.execute(instance, arguments, agent_data=None)
            finally:
                await self.tool.release(instance)
        except Exception as error:
            message = f"{self.name} failed: {one_line(str(error), LONGEST_MESSAGE) or type(error).__name__}"
            raise ToolError(message, kind=type(error).__name__, retry=False, own_fault=True) from error
        if response.text is None and not response.is_empty():
            raise ToolError(f"{self.name} returned no text", kind="no_text", retry=False)
        return response.text or ""


def _plain(values):
    return OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values


def _schema_of(tool_schema) -> OpenAIFunctionToolSchema | None:
    return OpenAIFunctionToolSchema.model_validate(_plain(tool_schema)) if tool_schema else None
