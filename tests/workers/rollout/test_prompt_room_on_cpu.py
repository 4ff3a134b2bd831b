"""A prompt to which an environment adds messages: one that gets too long fails."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.configs import composed
from tests.recipe.arpo.toy_agent import TOKENIZER, encode
from tests.workers.rollout.toy_engine import HashEngine
from verl.workers.rollout.environment import Environment
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.tree_rollout import TreeRollout

ROLLOUT = "actor_rollout_ref.rollout"
QUESTION = {"role": "user", "content": "who?"}


class Telling(Environment):
    async def first_messages(self, messages):
        return [{"role": "system", "content": "a long text " * 10}, *messages]


def prompt_of(prompt_length: int) -> str:
    """The prompt that a rollout sends to the engine for a question."""
    lengths = [f"{ROLLOUT}.prompt_length={prompt_length}", f"{ROLLOUT}.response_length=160"]
    config = composed("explore", "hardware=cpu", "tree=plain", *lengths)

    async def initial_tokens(messages, tools=None):  # cut as upstream cuts it
        text = "".join(f"{message['role']}\n{message['content']}\n" for message in messages)
        return encode(f"{text}assistant\n")[-prompt_length:]

    engine, agent_loop = HashEngine(), SimpleNamespace(ct_build_initial_tokens=initial_tokens)
    rollout = TreeRollout(config, agent_loop, engine, TOKENIZER, Telling())
    row = {"uid": "u", "index": 0, "raw_prompt": [QUESTION], "global_steps": 1}
    asyncio.run(rollout.run(PromptTask.of_row(row), 1, {"temperature": 1.0, "top_p": 1.0, "top_k": -1}))
    return TOKENIZER.decode(engine.asked[0].prompt_ids)


def test_a_prompt_without_room_for_what_the_environment_adds_fails():
    assert prompt_of(400) == f"system\n{'a long text ' * 10}\nuser\nwho?\nassistant\n"
    with pytest.raises(ValueError, match="data.max_prompt_length=64 leaves no room for what the environment adds"):
        prompt_of(64)
