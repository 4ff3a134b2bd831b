"""`describe_in_prompt=true`: the rollout's prompts name the tools, and one that gets too long fails."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.configs import composed
from tests.recipe.arpo.toy_agent import TOKENIZER, Library, encode
from verl.workers.rollout.engines.interface import Generation, GenerationRequest
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.tree_rollout import TreeRollout

ROLLOUT = "actor_rollout_ref.rollout"
QUESTION = {"role": "user", "content": "who?"}


class Answering:
    """An engine that answers at once, and keeps the prompts."""

    def __init__(self):
        self.prompts = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.prompts.append(TOKENIZER.decode(request.prompt_ids))
        tokens = [*encode("<answer>a</answer>"), TOKENIZER.eos_token_id]
        return Generation(tokens, [-1.0] * len(tokens), stopped=True)


class Catalog(Library):
    description = "Finds passages. Arguments: a JSON object"


def prompt_of(*overrides: str) -> str:
    """The prompt that a rollout sends to the engine for a question."""
    keys = ["environment=tools", f"{ROLLOUT}.tools.tool_instances.python=null", f"{ROLLOUT}.response_length=160"]
    keys.append(f"+{ROLLOUT}.tools.tool_instances.search={{class_path:{__name__}.Catalog,params:{{}}}}")
    config = composed("explore", "hardware=cpu", "tree=plain", *keys, *overrides)
    most = config.actor_rollout_ref.rollout.prompt_length

    async def initial_tokens(messages, tools=None):  # cut as upstream cuts it
        text = "".join(f"{message['role']}\n{message['content']}\n" for message in messages)
        return encode(f"{text}assistant\n")[-most:]

    engine = Answering()
    rollout = TreeRollout(config, SimpleNamespace(ct_build_initial_tokens=initial_tokens), engine, TOKENIZER)
    row = {"uid": "u", "index": 0, "raw_prompt": [QUESTION], "global_steps": 1}
    asyncio.run(rollout.run(PromptTask.of_row(row), 1, {"temperature": 1.0, "top_p": 1.0, "top_k": -1}))
    return engine.prompts[0]


def test_the_prompt_names_the_tools_if_the_config_says_so():
    assert prompt_of(f"{ROLLOUT}.prompt_length=400") == "user\nwho?\nassistant\n"
    described = prompt_of(f"{ROLLOUT}.prompt_length=400", f"{ROLLOUT}.tools.describe_in_prompt=true")
    assert described.startswith("system\nYou can call the tools below.") and described.endswith("who?\nassistant\n")
    assert "\n- <search>: Finds passages. Arguments: a JSON object\n" in described


def test_a_prompt_without_room_for_the_tools_fails():
    with pytest.raises(ValueError, match="data.max_prompt_length=64 leaves no room for what the environment adds"):
        prompt_of(f"{ROLLOUT}.prompt_length=64", f"{ROLLOUT}.tools.describe_in_prompt=true")
