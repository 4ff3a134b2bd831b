"""Tools with sessions: what a call leaves behind, later calls of its trajectory see, and no other branch does."""

import asyncio
from itertools import count

import pytest

from recipe.arpo.tree import ARPOConfig
from recipe.arpo.tree import Policy as ARPO
from tests.recipe.arpo.toy_agent import FOUR_EQUAL, TOKENIZER, ToyPolicy, encode
from verl.workers.rollout.stateful import InstanceKeys, InstancePool
from verl.workers.rollout.tools.base_tool import BaseTool, ToolError, ToolSession
from verl.workers.rollout.tools.environment import Tools
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig
from verl.workers.rollout.tree_builder import grow

TICKS = count()


class Notes(ToolSession):
    alive: set["Notes"] = set()

    def __init__(self, ticks: bool):
        self.lines, self.ticks = [], ticks
        self.alive.add(self)

    async def execute(self, content, *, timeout):
        await asyncio.sleep(0)
        self.lines.append(content)
        if content == "fail":
            raise ToolError("no paper", kind="paper", retry=False)
        return " ".join(self.lines) + (f" {next(TICKS)}" if self.ticks else "")

    async def close(self):
        self.alive.discard(self)


class NoteTool(BaseTool):
    """<search>: returns all that the trajectory has written; `ticks` adds a number that no two calls share."""

    name = trigger_tag = "search"
    has_session = True

    def __init__(self, ticks: bool = False, must_repeat: bool = True):
        self.ticks, self.must_repeat = ticks, must_repeat

    def new_session(self):
        return Notes(self.ticks)

    async def execute(self, content, *, timeout):
        raise NotImplementedError


def notes(max_instances=64, **params) -> Tools:
    tools = ToolBox(ToolsConfig(tool_instances={"n": {"class_path": f"{__name__}.NoteTool", "params": params}}))
    return Tools(tools, Protocol(TOKENIZER, ["search"]), InstancePool(InstanceKeys(max_instances=max_instances)))


def grown(worker: Tools):
    """A tree that forks after every result; each turn's query holds the turn's own letter and the number of results."""

    class Policy(ToyPolicy):
        def turn(self, first, results):
            return super().turn(first, results).replace(f"<search>{first}", f"<search>{first}{results}")

    async def run():
        environment = worker.open({}, 0)
        policy = ARPO(ARPOConfig(initial_rollouts=2, branch_probability=1.0, entropy_tokens=2), TOKENIZER.decode)
        engine = Policy(calls=2, spread=(0.0, FOUR_EQUAL))
        options = {"max_tokens": 400, "stop_token_ids": [TOKENIZER.eos_token_id], "vocab_size": len(TOKENIZER)}
        try:
            return await grow(engine, encode("assistant\n"), 8, policy, environment=environment, **options)
        finally:
            await environment.close()
            assert not Notes.alive and worker.pool.used == 0
            await worker.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("max_instances", [1, 64])
def test_a_trajectory_reads_its_own_notes_whatever_branches_beside_it(max_instances):
    tree = grown(notes(max_instances))
    rows = tree.trajectories()
    for row in rows:
        text = TOKENIZER.decode(row)
        queries = [part.split("</search>")[0] for part in text.split("<search>")[1:]]
        results = [part.split("\n</result>")[0] for part in text.split("<result>\n")[1:]]
        assert results == [" ".join(queries[: i + 1]) for i in range(len(results))] and len(results) == 2
    metrics = tree.metrics
    assert len(rows) == 8 and metrics["environment/replays"] > 0 == metrics["environment/replay_differs"]
    assert metrics["tool_calls"] == metrics["tool_search/calls"] and not metrics["tool_failures"]


def test_a_call_that_answers_otherwise_when_made_again_is_counted_or_loses_its_branch():
    counted = grown(notes(ticks=True, must_repeat=False))
    assert len(counted.leaves) == 8 and counted.metrics["environment/replayed_outputs_differ"] > 0
    lost = grown(notes(ticks=True))
    assert 2 <= len(lost.leaves) < 8 and lost.metrics["environment/replay_differs"] > 0


async def test_a_failed_call_is_part_of_the_session():
    environment = notes().open({}, 0)
    states, texts = None, []
    for content in ("a", "fail", "b"):
        call, states = await environment.sessions.call(states, "search", content)
        texts.append((call.text, call.ok))
    again, _ = await environment.sessions.call({}, "search", "c")
    await environment.close()
    assert texts == [("a", True), ("Error: no paper", False), ("a fail b", True)] and again.text == "c"


class PythonNotes(NoteTool):
    name = trigger_tag = "python"


def test_calls_of_tools_that_a_row_does_not_select_end_no_turn():
    """A row selects tools by `extra_info.tool_selection` or a column `tools`, as with environment=chat."""
    entries = {name: {"class_path": f"{__name__}.{name}"} for name in ("NoteTool", "PythonNotes")}
    worker = Tools(ToolBox(ToolsConfig(tool_instances=entries)), Protocol(TOKENIZER, ["search", "python"]))
    turn = encode("<search>x</search><python>1</python>")
    first = len(encode("<search>x</search>"))
    rows = [{}, {"tools": None}, {"tools": ["python"]}, {"extra_info": {"tool_selection": ["python"]}}]
    assert [worker.open(row, 0).ends(turn, ()).n_tokens for row in rows] == [first, first, len(turn), len(turn)]
    assert worker.open(rows[2], 0).stops([]) == ["</python>"]
