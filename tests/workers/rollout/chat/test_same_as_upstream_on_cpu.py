"""A trajectory in `environment=chat` has the tokens, mask and log-probabilities of verl's own agent loop for tools."""

import asyncio
from itertools import chain

import pytest
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from tests.configs import composed
from tests.tables import table
from tests.workers.rollout.chat.families import FAMILIES, FUNCTIONS, chat_of, encode, tokenizer_of
from verl.utils.parts import tree_part
from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.tree_builder import grow

ROLLOUT = "actor_rollout_ref.rollout"
QUESTION = [{"role": "user", "content": "Who tends the otter?"}]
FUNCTION_TOOLS = "verl.workers.rollout.tools.upstream_tool.FunctionTools"


class Script:
    """An engine, and verl's server, that samples scripted turns one after the other."""

    def __init__(self, turns: list[list[int]]):
        self.turns = iter(turns)

    def next(self) -> tuple[list[int], list[float]]:
        turn = next(self.turns)
        return turn, [-token / 1e6 for token in turn]

    async def generate(self, request=None, **_):
        tokens, log_probs = self.next()
        if request is None:
            return TokenOutput(token_ids=tokens, log_probs=log_probs)
        return Generation(tokens, log_probs, stopped=True)


async def by_upstream(name: str, turns: list[list[int]], config):
    agent_loop = ToolAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=Script(turns),
        tokenizer=tokenizer_of(name),
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type=FAMILIES[name].model_type,
        tools=ToolListWrap(load_all_tools(None, FUNCTIONS)),
    )
    output = await agent_loop.run({}, raw_prompt=QUESTION)
    return output.prompt_ids, output.response_ids, output.response_mask, output.response_logprobs


async def by_tree(name: str, turns: list[list[int]], config):
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    keys = {key: multi_turn[key] for key in ("max_parallel_calls", "max_tool_response_length", "max_assistant_turns")}
    tools = {"functions": {"class_path": FUNCTION_TOOLS, "params": {"path": FUNCTIONS}}}
    chat = chat_of(name, tools, call_limit=9, **keys)
    prompt = chat.template.builder.build_initial_tokens(QUESTION, tools=chat.schemas)
    options = {"max_tokens": 2000, "stop_token_ids": [tokenizer_of(name).eos_token_id, tokenizer_of(name).pad_token_id]}
    plain = tree_part("plain").policy.from_config(config)
    tree = await grow(Script(turns), prompt, 1, plain, environment=chat, **options)
    await chat.tools.close()
    return tree.prompt_ids, tree.trajectories()[0], tree.response_masks()[0], tree.log_probs()[0]


@pytest.mark.parametrize(("name", "keys", "texts"), table(__file__, "same as upstream"))
def test_ids_mask_and_log_probs_are_those_of_verls_agent_loop(name, keys, texts):
    turns = [encode(name, text) for text in texts]
    values = [f"{ROLLOUT}.multi_turn.{key}={value}" for key, value in keys.items()]
    values += [f"{ROLLOUT}.multi_turn.format={FAMILIES[name].format}", f"{ROLLOUT}.response_length=2000"]
    values += [f"{ROLLOUT}.prompt_length=1000"]
    config = composed("explore", "hardware=cpu", "tree=plain", "environment=chat", *values)
    expected, tree = (asyncio.run(run(name, turns, config)) for run in (by_upstream, by_tree))
    assert tree == expected
    assert [token for token, mask in zip(tree[1], tree[2], strict=True) if mask] == list(chain(*turns))
    assert 0 in tree[2]
