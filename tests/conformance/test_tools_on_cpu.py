"""Every tool that needs no network keeps what tests/conformance/tools.py asks of tools."""

import json
import sys

import pytest

from tests.conformance.tools import *  # noqa: F403
from tests.conformance.tools import Case
from tests.workers.rollout.tools.mcp import mcp_library
from tests.workers.rollout.tools.test_upstream_tool_on_cpu import Shelf
from verl.workers.rollout.tools.mcp.tool import MCPTool
from verl.workers.rollout.tools.python.tool import PythonTool
from verl.workers.rollout.tools.search.tool import LocalSearchTool

ANIMALS = ("otter", "heron")
KILLED, SLEEPS = "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)"


def path_of(tool: type) -> str:
    return f"{tool.__module__}.{tool.__name__}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [{"id": i, "title": animal, "text": f"The {animal} eats fish. " * 20} for i, animal in enumerate(ANIMALS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(params=["python", "search", "mcp", "upstream"])
def case(request, corpus):
    if request.param == "mcp":
        params = {"command": [sys.executable, mcp_library.__file__], "tools": ["search"]}
        return Case(path_of(MCPTool), params, "otter", "bad", "slow", {"url": "http://a", "tools": "all"})
    if request.param == "upstream":
        return Case(path_of(Shelf), {}, "Paris", '{"query": "bad"}', '{"query": "slow"}')
    if request.param == "python":
        bad_params = {"memory_mb": 0, "python_path": "/no/such/python"}
        return Case(path_of(PythonTool), {"num_workers": 4}, "print(40 + 2)", KILLED, SLEEPS, bad_params)
    bad_params = {"corpus": "/no/corpus", "url": "http://a"}
    return Case(path_of(LocalSearchTool), {"corpus": str(corpus)}, "otter", bad_params=bad_params)
