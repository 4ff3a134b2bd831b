"""An adapter that runs one of verl's own tools (a `verl.tools.base_tool.BaseTool`, verl 0.9.1) as one of ours.

    tool_instances:
      crawl:
        class_path: my_project.tools.CrawlTool
        params: {config: {type: native}, tool_schema: {type: function, function: {name: crawl, …}}}

`FunctionTools` does the same for a Python file's functions with upstream's decorator `function_tool`, and a
`class_path` may name a plain function. The tag is the function's name; function_calls.py says what the text between the
tags may be. A trajectory's calls are independent: each has its own instance (verl's `create`, `execute`, `release`).
The tool's reward and metrics are not used.
"""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from verl.tools.base_tool import BaseTool as UpstreamBaseTool
from verl.tools.function_tool import (
    FunctionTool,
    function_tool,
    get_function_tool,
    load_function_tools_from_path,
    normalize_function_tool_return,
)
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl.workers.rollout.tools.base_tool import BaseTool, ToolError, ToolSet
from verl.workers.rollout.tools.function_calls import call_arguments, wrong_argument
from verl.workers.rollout.tools.plain_text import one_line

MAX_MESSAGE_CHARS = 300  # largest number of characters of an exception's text for the model


def adapted(upstream: Any) -> type[BaseTool] | None:
    """Return one of our tool classes that runs verl's tool class or a function; None for anything else."""
    if inspect.isfunction(upstream):
        return type(upstream.__name__, (PlainFunction,), {"run": staticmethod(upstream)})
    if not (isinstance(upstream, type) and issubclass(upstream, UpstreamBaseTool)):
        return None
    return type(upstream.__name__, (UpstreamTool,), {"upstream": upstream})


class _FunctionWithSchema(BaseTool):
    """A function with a schema in OpenAI's format; `respond` runs a call with its arguments as upstream does."""

    argument = None

    def __init__(self, tool_schema: OpenAIFunctionToolSchema, respond: Callable[[dict], Awaitable[ToolResponse]]):
        self._tool_schema, self._respond, function = tool_schema, respond, tool_schema.function
        self.name = self.trigger_tag = function.name
        self.schema = function.parameters.model_dump(exclude_none=True)

    def function(self) -> dict[str, Any]:
        """Return the schema as upstream gives it to a chat template."""
        return self._tool_schema.model_dump(exclude_unset=True, exclude_none=True)

    async def execute(self, content: str, *, timeout: float) -> str:
        arguments = call_arguments(self.schema, content)
        if fault := wrong_argument(self.name, self.schema, arguments):
            raise ToolError(fault, kind="bad_arguments", retry=False)
        try:
            response = await self._respond(arguments)
        except ToolError:
            raise
        except Exception as error:
            message = f"{self.name} failed: {one_line(str(error), MAX_MESSAGE_CHARS) or type(error).__name__}"
            raise ToolError(message, kind=type(error).__name__, retry=False, own_fault=True) from error
        if response.text is None and not response.is_empty():
            raise ToolError(f"{self.name} returned no text", kind="no_text", retry=False)
        return response.text or ""


class UpstreamTool(_FunctionWithSchema):
    """One of verl's tools as one of ours; without `tool_schema`, its class makes the schema."""

    upstream: type[UpstreamBaseTool]

    def __init__(self, *, config: dict | None = None, tool_schema: dict | None = None):
        self.tool = self.upstream(config or {}, _schema_of(tool_schema))
        super().__init__(self.tool.tool_schema, self._response)

    @classmethod
    def check(cls, *, config: dict | None = None, tool_schema: dict | None = None) -> None:
        makes_none = cls.upstream.get_openai_tool_schema is UpstreamBaseTool.get_openai_tool_schema
        if _schema_of(tool_schema) is None and makes_none:
            raise ValueError(f"params.tool_schema is missing, and {cls.upstream.__name__} makes none itself")

    async def _response(self, arguments: dict[str, Any]) -> ToolResponse:
        instance, _ = await self.tool.create(create_kwargs={})
        try:
            response, _, _ = await self.tool.execute(instance, arguments, agent_data=None)
        finally:
            await self.tool.release(instance)
        return response


class PlainFunction(_FunctionWithSchema):
    """A function as a tool. Upstream derives the schema from its type hints and docstring, whose part "Args:" describes
    each argument."""

    run: Callable[..., Any]

    def __init__(self):
        function = self._function()
        super().__init__(function.tool_schema, partial(_response_of, function))

    @classmethod
    def check(cls) -> None:
        try:
            cls._function()
        except Exception as error:  # transformers raises errors of its own
            raise ValueError(f"{cls.run.__name__} does not describe itself as a tool: {error}") from error

    @classmethod
    def _function(cls) -> FunctionTool:
        function_tool(cls.run)
        return get_function_tool(cls.run.__name__)


class FunctionTools(ToolSet):
    """The tools of a Python file, functions with verl's decorator `function_tool`."""

    def __init__(self, path: str):
        self.check(path)
        try:
            functions = load_function_tools_from_path(path)
        except Exception as error:  # the file may raise anything
            raise ValueError(f"{path} does not load: {type(error).__name__}: {error}") from error
        if not functions:
            raise ValueError(f"{path} has no function with the decorator verl.tools.function_tool.function_tool")
        self.tools = [_FunctionWithSchema(each.tool_schema, partial(_response_of, each)) for each in functions]

    @classmethod
    def check(cls, path: str) -> None:
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}")


async def _response_of(function: FunctionTool, arguments: dict[str, Any]) -> ToolResponse:
    response, _, _ = normalize_function_tool_return(await function.call(arguments))
    return response


def _schema_of(tool_schema: dict | None) -> OpenAIFunctionToolSchema | None:
    return OpenAIFunctionToolSchema.model_validate(tool_schema) if tool_schema else None
