"""Computes the policy's own likelihood of the reference answer after any beginning of a response.

The policy scores three texts in a row: the beginning, a text that closes the thought and opens the answer, and the
reference answer. The policy generates nothing after having read the reference answer; it only scores it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from verl.utils.reward_score.qa import gold_answers
from verl.utils.token_fields import TokenField
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.trajectory_tree import TOOL, Path, TrajectoryTree, common_prefix

# (token ids before a continuation, token ids of the continuation) -> log-probability of each of the latter, in nats
ScoreTokens = Callable[[Sequence[int], Sequence[int]], Awaitable[list[float]]]
ANSWER_GAINS = TokenField(
    "answer_gains", "a credit of gains of the answer's likelihood", unsent=math.nan, on_demand=True
)
# Most tokens of a request in one step of an engine that scores (vLLM's `long_prefill_token_threshold`): its V1 runner
# holds the logits and float32 log-probabilities of all of them at once, 0.9 GB for a vocabulary of 152,000.
MAX_SCORED_TOKENS = 1024
# default texts that close a thought and open an answer
CLOSING = " The answer is "
CLOSING_WITH_TOOLS = r"</think><answer>\boxed{"


def reference_answers(row: Mapping) -> list[str]:
    """Return the reference answers, at least one, of a data row in verl's format. `reward_model.ground_truth` is an
    answer (a text or a number), a list of answers, or such a list as JSON text. A mapping or a JSON object describes a
    task, and raises ValueError."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if isinstance(truth, Mapping) or (isinstance(truth, str) and truth.lstrip().startswith("{")):
        raise ValueError(f"ground_truth {truth!r} describes a task and holds no reference answer")
    return gold_answers(truth)


def answer_tokens(tokenizer, closing: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the token ids of the closing text, and those of the answer after it, tokenized together as the model reads
    them. A token that spans both belongs to the answer."""
    alone = tokenizer.encode(closing, add_special_tokens=False)
    both = tokenizer.encode(closing + answer, add_special_tokens=False)
    same = min(common_prefix(alone, both), len(both) - 1)
    return both[:same], both[same:]


def closing_text(config) -> str:
    """Return the text that closes a thought and opens an answer: `rollout.answer_closing`, or the environment's."""
    rollout = config.actor_rollout_ref.rollout
    if (closing := rollout.get("answer_closing")) is not None:
        return closing
    return CLOSING_WITH_TOOLS if rollout.get("environment") == "tools" else CLOSING


@dataclass(eq=False)
class AnswerLikelihood:
    """The likelihood of a prompt's reference answer after any tokens, which are scored once."""

    score: ScoreTokens  # scores by the engine that samples the responses, and so by the same weights
    tokenizer: Any
    closing: str  # closes the thought and opens the answer
    answers: Sequence[str]  # at least one; the most likely one counts
    context: float = math.inf  # number of tokens that the engine reads at most
    left_out: int = field(default=0, init=False)  # number of beginnings after which an answer did not fit
    _scores: dict[tuple[int, ...], asyncio.Task] = field(default_factory=dict)

    def __post_init__(self):
        self._continuations = [answer_tokens(self.tokenizer, self.closing, answer) for answer in self.answers]

    async def log_prob(self, tokens: Sequence[int]) -> float:
        """Return the mean log-probability, in nats per token, of the answer after what the model has read and written
        (`Path.request`) and the closing text. It is NaN if these, each answer, and one token more exceed the context.
        """
        beginning = tuple(tokens)
        if beginning not in self._scores:
            self._scores[beginning] = asyncio.ensure_future(self._best(beginning))
        return await self._scores[beginning]

    async def _best(self, beginning: tuple[int, ...]) -> float:
        if len(beginning) + max(len(closing) + len(answer) for closing, answer in self._continuations) >= self.context:
            self.left_out += 1
            return math.nan
        scores = [await self.score([*beginning, *closing], answer) for closing, answer in self._continuations]
        return max(map(fmean, scores))


async def answer_gains(tree: TrajectoryTree, likelihood: AnswerLikelihood, log_prob: bool = False) -> list[list[float]]:
    """Return the `ANSWER_GAINS` of each of a tree's rows: the last token of each turn except the final one holds the
    change of the answer's likelihood during that turn; all other tokens hold NaN, and so do turns before or after which
    the answer did not fit into the context.

    A turn ends with a tool's result, or with a segment that ends a step of the policy (`SegmentInfo.ends_step`). With
    `log_prob` gains are differences of mean log-probabilities in nats instead of probabilities.
    """

    async def value(beginning: Sequence[int]) -> float:
        score = await likelihood.log_prob(beginning)
        return score if log_prob else math.exp(score)

    async def row_gains(leaf: int) -> list[float]:
        path = Path()
        ends = [path]
        for i in tree.path(leaf):
            segment = tree.segments[i]
            path = path.then(segment)
            if i != leaf and (segment.author == TOOL or segment.info.ends_step):
                ends.append(path)
        values = await gather_or_cancel(*(value(end.request(tree.prompt_ids)) for end in ends))
        gains = [math.nan] * len(path.tokens)
        for end, (before, after) in zip(ends[1:], pairwise(values), strict=True):
            gains[len(end.tokens) - 1] = after - before
        return gains

    return await gather_or_cancel(*(row_gains(leaf) for leaf in tree.leaves))
