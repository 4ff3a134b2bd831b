"""`environment=agent`: what turns read and rows hold for programs that continue, rewrite or change their messages, and
branches by a second run. The model is a script; programs, gateway and tokens are real."""

import asyncio
import sys
from pathlib import Path

import pytest

from recipe.common.tree import Policy as Plain
from tests.tables import table
from tests.workers.rollout.agent import agents
from tests.workers.rollout.chat.families import chat_of, encode, tokenizer_of
from verl.workers.rollout.agent.chat_completions import AgentRequest, Reply, agent_request
from verl.workers.rollout.agent.environment import Agent, AgentKeys
from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.environment import BranchLost, Ends
from verl.workers.rollout.run_environment import try_agent
from verl.workers.rollout.trajectory_tree import TOOL
from verl.workers.rollout.tree_builder import grow
from verl.workers.rollout.tree_rollout import rows_of

ROW = {"raw_prompt": [{"role": "user", "content": "What is 3 + 4?"}], "index": 5}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": 4}}\n</tool_call>'
END = "<|im_end|>"


class Script:
    """An engine that says the next of these turns after each request of a session; it keeps what was read."""

    def __init__(self, name, *turns):
        self.name, self.turns, self.read = name, [encode(name, turn) for turn in turns], []

    async def generate(self, request):
        self.read.append(list(request.prompt_ids))
        tokens = self.turns[(len(self.read) - 1) % len(self.turns)]
        text = tokenizer_of(self.name).decode(tokens)
        for stop in request.stop:
            if stop in text:  # vLLM ends with the token that completes it
                n = next(n for n in range(len(tokens) + 1) if stop in tokenizer_of(self.name).decode(tokens[:n]))
                tokens = tokens[:n]
        tokens = tokens[: request.max_tokens]
        return Generation(tokens, [-token / 1e6 for token in tokens], stopped=True)


def agent_of(function: str, name: str = "qwen2_5", **keys) -> Agent:
    chat = chat_of(name)
    if not {"command", "class_path"} & keys.keys():
        keys["class_path"] = f"{agents.__name__}.{function}"
    return Agent(AgentKeys(**{"timeout": 20.0} | keys), chat.template, chat.reader)


async def grown(agent: Agent, engine, n=1, policy=None):
    ends = [tokenizer_of(engine.name).eos_token_id]
    try:
        async with agent.opened(ROW, seed=3) as opened:
            messages = await opened.first_messages(ROW["raw_prompt"])
            prompt = opened.template.builder.build_initial_tokens(messages, tools=opened.schemas)
            options = {"max_tokens": 600, "stop_token_ids": ends, "max_model_len": 2000, "request_id": "a"}
            tree = await grow(engine, prompt, n, policy or Plain(), environment=opened, **options)
            return tree, opened
    finally:
        await agent.stop()


def run(function: str, *turns: str, name: str = "qwen2_5", **keys):
    engine = Script(name, *turns)
    tree, opened = asyncio.run(grown(agent_of(function, name, **keys), engine))
    return engine, tree, opened


def text(tokens, name: str = "qwen2_5") -> str:
    return tokenizer_of(name).decode(list(tokens))


def sampled(tree) -> list[int]:
    """The model's tokens of the first row."""
    return [token for token, mask in zip(tree.trajectories()[0], tree.response_masks()[0], strict=True) if mask]


# ---- what turns read ----


@pytest.mark.parametrize("is_command", [False, True])
def test_a_program_that_continues_its_messages_has_the_rows_of_environment_chat(is_command):
    command = [sys.executable, str(Path(agents.__file__)), "plain"]
    keys = {"command": command, "env": {"PYTHONPATH": str(Path(agents.__file__).parents[4])}} if is_command else {}
    turns = ["Let me  see." + CALL % 3 + END, CALL % 10 + END, "It is 14." + END]
    _, tree, opened = run("plain", *turns, **keys)
    assert tree.contexts(tree.leaves[0]) == [] and opened.counts["agent_continued"] == 2

    async def by_chat():
        chat = chat_of("qwen2_5", {"add": {"class_path": "tests.workers.rollout.chat.families.Add"}})
        chat.schemas = agents.TOOLS
        prompt = chat.template.builder.build_initial_tokens(ROW["raw_prompt"], tools=agents.TOOLS)
        options = {"max_tokens": 600, "stop_token_ids": [tokenizer_of("qwen2_5").eos_token_id]}
        return await grow(Script("qwen2_5", *turns), prompt, 1, Plain(), environment=chat, **options)

    chat = asyncio.run(by_chat())
    assert tree.prompt_ids == chat.prompt_ids and tree.trajectories() == chat.trajectories()
    assert (tree.response_masks(), tree.log_probs()) == (chat.response_masks(), chat.log_probs())


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_a_rewritten_message_begins_a_sequence_as_the_template_serves_it(name):
    engine, tree, opened = run("rewriting", "Hm." + CALL % 3 + END, "It is 7." + END, name=name)
    (context,) = tree.contexts(tree.leaves[0])
    assert opened.counts["agent_rewritten"] == 1
    messages = [*ROW["raw_prompt"], {"role": "assistant", "content": "Hm. (calling a tool)"}]
    messages += [{"role": "user", "content": "7"}]
    template = opened.template.builder
    assert list(context.ids) == template.build_initial_tokens(messages, tools=agents.TOOLS) == engine.read[1]
    assert text(tree.trajectories()[0], name).endswith("It is 7." + END) and "<think>" not in text(context.ids, name)


def test_a_helper_has_a_context_of_its_own_and_the_first_conversation_goes_on():
    engine, tree, opened = run("with_helper", "I  think 7." + END, "Yes." + END, "7" + END)
    assert (opened.counts["agent_new"], opened.counts["agent_earlier"]) == (1, 1)
    helper, back = tree.contexts(tree.leaves[0])
    assert "You check sums." in text(helper.ids) and "I  think" not in text(helper.ids)
    first = [*engine.read[0], *engine.turns[0]]
    assert list(back.ids[: len(first)]) == first, "the very tokens that were sampled"
    assert text(back.ids[len(first) :]).count("The helper says Yes.") == 1
    assert text(sampled(tree)) == f"I  think 7.{END}Yes.{END}7{END}"


@pytest.mark.parametrize(
    ("reasoning", "thinking", "n_contexts"), [("hidden", "kept", 0), ("hidden", "dropped", 1), ("content", "kept", 0)]
)
def test_thoughts_are_hidden_or_sent_and_read_or_not(reasoning, thinking, n_contexts):
    turns = ["<think>\nabc\n</think>\n\n" + CALL % 3 + END, "<think>d</think>Seven." + END]
    engine, tree, _ = run("plain", *turns, name="qwen3", reasoning=reasoning, thinking=thinking)
    assert len(tree.contexts(tree.leaves[0])) == n_contexts
    assert ("abc" in text(engine.read[1], "qwen3")) == (thinking == "kept")
    assert "abc" in text(tree.trajectories()[0], "qwen3")


def test_stop_texts_and_limits_of_a_request_end_its_turn():
    engine, tree, _ = run("with_stops", "one two STOP three" + END, "a b c d e f" + END)
    row = text(tree.trajectories()[0])
    assert "one two STOP" in row and "three" not in row
    assert text(engine.read[1]).count("one two") == 2, "the program got the text before the stop"
    assert sampled(tree)[-3:] == engine.turns[1][:3]


@pytest.mark.parametrize(
    ("said", "stops", "n_tokens"),
    [("a b Obser", ["Observation:", "vation:"], None), ("a b Observation: c d", ["Observation:"], "a b Observation:")],
)
def test_a_stop_text_may_lie_in_two_parts_of_a_turn(said, stops, n_tokens):
    request = agent_request({"messages": [{"role": "user", "content": "hi"}], "stop": ["Observation:"]})
    agent = agent_of("plain")
    agent.present = request
    turn = encode("qwen2_5", said)
    assert agent.stops(turn) == stops
    ends = agent.ends(turn, set())
    assert (ends.ends is Ends.TURN) == (n_tokens is not None)
    assert text(turn[: ends.n_tokens]).startswith(n_tokens or said)
    assert n_tokens is None or n_tokens not in text(turn[: ends.n_tokens - 1])


# ---- outcomes ----


@pytest.mark.parametrize(("function", "said", "reward", "rewards"), table(__file__, "results"))
def test_results_are_rewards(function, said, reward, rewards):
    _, tree, _ = run(function, said + END, reward=reward)
    assert [sum(of_turns.values()) for of_turns in tree.turn_rewards] == rewards


def test_a_program_without_a_request_fails_its_group():
    with pytest.raises(BranchLost, match="the agent ended without a request: nothing"):
        run("silent", "7" + END)


# ---- branches ----


class Forks(Plain):
    """Two trajectories that share the first turn."""

    async def grow(self, builder, n):
        from verl.workers.rollout.tree_builder import Path

        first = await builder.advance(Path(), seed=1)
        at = builder.tree.add_chain(None, first.segments)
        for seed in range(n):
            rest = await builder.continue_to_end(first.path, seed)
            if builder.lost:
                continue
            builder.tree.leaves.append(builder.tree.add_chain(at, rest.segments))


def test_a_branch_is_a_second_run_with_the_recorded_replies():
    for function in ("plain", "rewriting"):
        engine = Script("qwen2_5", "Hm." + CALL % 3 + END, "It is 7." + END, "It may be 7." + END)
        tree, opened = asyncio.run(grown(agent_of(function, replay=True), engine, 2, Forks()))
        endings = [text(row).rpartition("assistant")[2].strip() for row in tree.trajectories()]
        assert endings == ["It is 7." + END, "It may be 7." + END]
        assert opened.counts["instances"] == 2 and opened.counts["replays"] == 1
        assert opened.counts["replay_differs"] == 0


def test_a_run_that_sends_other_requests_loses_the_branch():
    engine = Script("qwen2_5", *(number + END for number in ("one", "two", "three", "four", "five")))
    tree, opened = asyncio.run(grown(agent_of("differs", replay=True, ignored=[]), engine, 2, Forks()))
    assert len(tree.leaves) == 1 and opened.counts["replay_differs"] == 1
    forgiving = agent_of("differs", replay=True, ignored=["number [0-9a-f-]+"])
    tree, opened = asyncio.run(grown(forgiving, engine, 2, Forks()))
    assert len(tree.leaves) == 2 and opened.counts["replay_differs"] == 0
    results = [segment for segment in tree.segments if segment.author == TOOL]
    assert len(results) == 3, "the first is shared"
    assert opened.counts["agent_new"] == 0 and opened.counts["agent_continued"] == 3


def test_a_trial_shows_where_two_runs_differ():
    def tried(function):
        keys = AgentKeys(class_path=f"{agents.__name__}.{function}", timeout=20.0)
        return try_agent(keys, ROW, [Reply("7")], max_steps=5)

    first, end = tried("plain")
    assert first.observation.messages[-1]["content"] == "What is 3 + 4?" and end.observation.result == "7"
    with pytest.raises(
        ValueError, match=r"(?s)differ.* Request 1:\n.*number [0-9a-f]{8}-.*\nand in the second run:\n.*nu"
    ):
        tried("differs")


def test_requests_of_smolagents_and_the_agents_sdk():
    """Texts in parts, a required call, and calls that come back with null content: forms that these clients send."""
    part = [{"type": "text", "text": "3 + 4?"}]
    body = {"model": "policy", "messages": [{"role": "user", "content": part}], "tool_choice": "required"}
    body |= {"stop": ["Observation:", "</code>"], "tools": agents.TOOLS, "stream": True}
    first = agent_request(body)
    assert first.messages == ({"role": "user", "content": "3 + 4?"},) and first.stop == ("Observation:", "</code>")
    function = {"name": "add", "arguments": '{"a": 3, "b": 4}'}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1_0", "function": function}]}
    messages = [*body["messages"], said, {"role": "tool", "tool_call_id": "call_1_0", "content": "7.0"}]
    second = agent_request(body | {"messages": messages})
    assert second.follows(first) and not first.follows(second) and not first.follows(first)
    assert not agent_request(body | {"messages": messages, "tools": []}).follows(first)


# ---- without replays ----


def test_equal_replies_share_no_program_where_it_may_not_run_again():
    """Each trajectory is a run of its own, to its end."""
    engine = Script("qwen2_5", *[CALL % 3 + END] * 4, "one" + END, "two" + END, "three" + END, "four" + END)
    tree, opened = asyncio.run(grown(agent_of("plain"), engine, 4))
    assert len(tree.leaves) == 4 == opened.counts["instances"] and opened.counts["replayed_actions"] == 0


def test_programs_whose_texts_are_equal_have_results_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setitem(ROW, "extra_info", {"winner": str(tmp_path / "winner")})
    engine = Script("qwen2_5", "7" + END)
    tree, _ = asyncio.run(grown(agent_of("lottery", reward="result"), engine, 4))
    assert sorted(sum(rewards.values()) for rewards in tree.turn_rewards) == [0, 0, 0, 1]
    assert [row.num_turns for row in rows_of(tree, Plain())] == [2] * 4
    assert len({tuple(ids) for ids in tree.segment_ids()}) == 1, "their tokens are shared"


def test_trajectories_that_are_cut_leave_their_places_to_others():
    """More trajectories than places, and each is cut at the limit of its steps."""
    engine = Script("qwen2_5", CALL % 3 + END)
    tree, opened = asyncio.run(grown(agent_of("plain", max_instances=2, max_steps=1), engine, 6))
    assert len(tree.leaves) == 6 and opened.counts["replayed_actions"] == 0


def test_a_client_that_asks_again_gets_the_reply_that_it_had_asked_for():
    class Slow(Script):
        async def generate(self, request):
            await asyncio.sleep(1.5)
            return await super().generate(request)

    engine = Slow("qwen2_5", "one" + END, "two" + END)
    tree, opened = asyncio.run(grown(agent_of("impatient"), engine))
    assert text(sampled(tree)) == "one" + END and opened.counts["instances"] == 1


def test_dates_are_left_out_of_each_text_alone():
    def request(result: str, day: str = "Monday") -> AgentRequest:
        messages = [{"role": "system", "content": f"Today is {day}.\nAdd."}, {"role": "user", "content": result}]
        tools = [{"type": "function", "function": {"name": "add", "description": f"Today is {day}."}}]
        return agent_request({"messages": messages, "tools": tools}, ["Today is .*"])

    assert request("7") == request("7", "Tuesday") and request("7") != request("8")
