"""Trees in `environment=chat`: the rows' tokens and masks, shared calls, and the limit of answers."""

import asyncio
import random

import pytest

from tests.configs import composed
from tests.workers.rollout.chat.families import chat_of, encode, tokenizer_of
from verl.utils.parts import tree_part
from verl.workers.rollout.engines.interface import Generation, GenerationRequest
from verl.workers.rollout.trajectory_tree import TOOL
from verl.workers.rollout.tree_builder import grow
from verl.workers.rollout.tree_rollout import rows_of

NAME = "qwen2_5"
TOKENIZER = tokenizer_of(NAME)
CALL = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call><|im_end|>'
ANSWER = "\n<|im_start|>user\n<tool_response>\nfound %s\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LETTERS = "abcdefgh"


class Caller:
    """An engine that calls the tool with a letter, which the seed chooses, and after some answers gives one."""

    def __init__(self, calls: int):
        self.calls, self.beginning = calls, encode(NAME, "<|im_start|>assistant\n")

    async def generate(self, request: GenerationRequest) -> Generation:
        ids, size = request.prompt_ids, len(self.beginning)
        start = max(i for i in range(size, len(ids) + 1) if ids[i - size : i] == self.beginning)
        answers = TOKENIZER.decode(ids).count("<tool_response>")
        begun = ids[start:]
        letter = TOKENIZER.decode(begun[:1]) or random.Random(request.seed).choice(LETTERS)
        tokens = encode(NAME, turn_of(letter, answers < self.calls))[len(begun) :][: request.max_tokens]
        entropies = [1.0] * len(tokens) if request.n_entropy else None
        stopped = tokens[-1] in request.stop_token_ids
        return Generation(tokens, [-1.0] * len(tokens), stopped=stopped, entropies=entropies)


def turn_of(letter: str, calls: bool) -> str:
    return letter + (CALL % letter if calls else "<|im_end|>")


def rows(tree_name: str, calls: int, call_limit: int = 3, n: int = 6):
    chat = chat_of(NAME, call_limit=call_limit)
    config = composed("explore", "hardware=cpu", f"tree={tree_name}", "environment=chat")
    policy = tree_part(tree_name).policy.from_config(config, TOKENIZER)
    prompt = chat.template.builder.build_initial_tokens([{"role": "user", "content": "?"}], tools=chat.schemas)
    options = {"max_tokens": 500, "stop_token_ids": [TOKENIZER.eos_token_id], "vocab_size": len(TOKENIZER), "seed": 3}
    tree = asyncio.run(grow(Caller(calls), prompt, n, policy, environment=chat, **options))
    return tree, rows_of(tree, policy)


@pytest.mark.parametrize("tree_name", ["plain", "arpo"])
@pytest.mark.parametrize(("calls", "call_limit"), [(0, 3), (2, 3), (2, 1)])
def test_rows_hold_the_models_turns_and_the_answers_behind_them(tree_name, calls, call_limit):
    tree, outputs = rows(tree_name, calls, call_limit)
    answered = min(calls, call_limit)
    assert len(outputs) == 6
    for output in outputs:
        turns = TOKENIZER.decode(output.response_ids).split("<|im_start|>assistant\n")
        letters = [turn[0] for turn in turns]
        ids, mask = [], []
        for number, letter in enumerate(letters):
            sampled = encode(NAME, turn_of(letter, number < calls))
            answer = encode(NAME, ANSWER % letter) if number < answered else []
            ids, mask = [*ids, *sampled, *answer], [*mask, *[1] * len(sampled), *[0] * len(answer)]
        assert (output.response_ids, output.response_mask) == (ids, mask)
        assert len(letters) == answered + 1 and output.num_turns == 2 + 2 * answered
    if tree_name == "plain":
        assert tree.metrics["tool_calls"] == 6 * answered


def test_branches_share_the_calls_before_their_fork():
    tree, outputs = rows("arpo", calls=2, n=16)
    assert tree.metrics["forks"] > 0
    n_answers = sum(segment.author == TOOL for segment in tree.segments)
    assert tree.metrics["tool_calls"] == n_answers < 2 * len(outputs)
