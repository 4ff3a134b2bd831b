"""The search that takes time answers what the search does, and takes the time it says."""

import asyncio
import json
import math
import statistics

import pytest

from benchmarks.slow_search import SlowSearchTool
from verl.workers.rollout.tools.search.tool import LocalSearchTool


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": str(i), "title": name, "text": f"{name}: age {i}"} for i, name in enumerate(("bo", "ta", "ku"))]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


async def answers(tool, queries):
    return [(await tool.execute(query, timeout=5)).text for query in queries]


def test_its_answers_are_those_of_the_search_and_its_times_are_log_normal(corpus, monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr("benchmarks.slow_search.asyncio.sleep", sleep)
    queries = ["bo", "ta", "ku age"] * 200
    slow = asyncio.run(answers(SlowSearchTool(corpus=corpus, median=0.5, sigma=1.0), queries))
    assert slow == asyncio.run(answers(LocalSearchTool(corpus=corpus), queries))
    assert len(slept) == len(queries)
    logarithms = [math.log(seconds) for seconds in slept]
    assert statistics.mean(logarithms) == pytest.approx(math.log(0.5), abs=0.15)
    assert statistics.stdev(logarithms) == pytest.approx(1.0, abs=0.1)
