"""A toy policy that writes thoughts, calls and answers: an engine with known text, entropies, delays and faults."""

import asyncio
import math
import random
import string

from recipe.common.tiny_model import END_OF_TURN, make_tokenizer
from verl.workers.rollout import tree_builder
from verl.workers.rollout.engines.interface import Generation, GenerationRequest
from verl.workers.rollout.tools.base_tool import BaseTool
from verl.workers.rollout.tools.environment import Tools
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig
from verl.workers.rollout.trajectory_tree import TrajectoryTree

TOKENIZER = make_tokenizer()
FOUR_EQUAL = math.log(4)  # nats


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


PROMPT = encode("<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n")


class ToyPolicy:
    """Draws a turn's first letter by the request's seed, the rest follows.

    Args:
        calls: tool calls before it answers.
        spread: entropy of a step in nats, by whether a result stands before it.
        delay: most seconds that a request takes.
    """

    def __init__(self, calls=2, spread=(0.0, FOUR_EQUAL), delay=0.0, order=0, query="{}", close="</search>"):
        self.calls, self.spread, self.delay, self.clock = calls, spread, delay, random.Random(order)
        self.query, self.close, self.requests, self.running = query, close, [], 0

    def turn(self, first: str, results: int) -> str:
        """A whole turn, which its first letter decides."""
        thought = f"{first}<think>so</think>"
        if results >= self.calls:
            return f"{thought}<answer>{first}</answer>{END_OF_TURN}"
        return f"{thought}<search>{self.query.format(first)}{self.close}"

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        self.running += 1
        try:
            await asyncio.sleep(self.clock.random() * self.delay)
        finally:
            self.running -= 1
        text = TOKENIZER.decode(request.prompt_ids)
        begun = text.rsplit("</result>", 1)[-1] if "</result>" in text else text.rsplit("assistant\n", 1)[-1]
        results = text.count("<result>")
        tokens = self._rest(begun, request.seed, results)[: request.max_tokens]
        for end in range(1, len(tokens) + 1):
            if any(one in TOKENIZER.decode(tokens[:end]) for one in request.stop):
                tokens = tokens[:end]
                break
        entropies = [self.spread[min(results, 1)]] * len(tokens) if request.n_entropy else None
        log_probs = [-float(i + 1) for i in range(len(tokens))]
        return Generation(tokens, log_probs, stopped=tokens[-1] in request.stop_token_ids, entropies=entropies)

    def _rest(self, begun: str, seed: int, results: int) -> list[int]:
        first = begun[0] if begun else random.Random(seed).choice(string.ascii_letters)
        return encode(self.turn(first, results))[len(encode(begun)) :]


class Library(BaseTool):
    """<search>: answers with the query; some queries fail, and it may be slow."""

    name, trigger_tag = "search", "search"

    def __init__(self, answer: str = "about {}", delay: float = 0.0, order: int = 0):
        self.answer, self.delay, self.clock, self.asked = answer, delay, random.Random(order), []

    async def execute(self, content: str, *, timeout: float) -> str:
        self.asked.append(content)
        await asyncio.sleep(self.clock.random() * self.delay)
        return self.answer.format(content)


def library(limits=None, **params) -> ToolBox:
    entry = {"class_path": f"{__name__}.Library", "params": params}
    return ToolBox(ToolsConfig(tool_instances={"search": entry}, timeout=5, **(limits or {})))


def library_tools(tools=None, **limits) -> Tools:
    """The library as an environment, with keys of `ToolsConfig`."""
    tools = tools or library(limits)
    return Tools(tools, Protocol(TOKENIZER, list(tools.tools)))


def grow(engine, policy, n: int, environment: Tools, max_tokens: int = 400) -> TrajectoryTree:
    options = {"max_tokens": max_tokens, "stop_token_ids": [TOKENIZER.eos_token_id], "vocab_size": len(TOKENIZER)}
    return asyncio.run(tree_builder.grow(engine, PROMPT, n, policy, environment=environment, seed=0, **options))


def texts(tree: TrajectoryTree) -> list[str]:
    return [TOKENIZER.decode(tokens) for tokens in tree.trajectories()]
