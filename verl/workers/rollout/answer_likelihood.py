"""How likely the policy itself holds the reference answer after any beginning of a response.

A verifiable task has a reference answer, and the policy says how likely it is: it reads the beginning, a text that
closes the thought and opens the answer, and then the reference. IGPO (arXiv 2510.14967) makes a reward of each turn of
it. The model is never shown the reference: it is scored, not sampled.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from verl.utils.parts import credit_of
from verl.utils.reward_score.qa import gold_answers
from verl.utils.token_fields import TokenField
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.trajectory_tree import TOOL, TrajectoryTree

# token ids before a continuation, and its token ids -> log-probability of each in nats
ScoreTokens = Callable[[Sequence[int], Sequence[int]], Awaitable[list[float]]]
ANSWER_GAINS = TokenField("answer_gains", "algorithm.adv_estimator=igpo", unsent=math.nan, on_demand=True)
# of `hato.local_reward`
ANSWER_LIKELIHOOD = "answer_likelihood"
# what closes a thought and opens an answer
CLOSING = " The answer is "
CLOSING_WITH_TOOLS = r"</think><answer>\boxed{"


def reference_answers(row: Mapping) -> list[str]:
    """Return the reference answers of a row in verl's format, at least one.

    Raises:
        ValueError: `reward_model.ground_truth` is no answer, or a description of the task from which none follows.
    """
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if isinstance(truth, Mapping) or (isinstance(truth, str) and truth.lstrip().startswith("{")):
        raise ValueError(f"ground_truth {truth!r} describes a task and holds no reference answer")
    return gold_answers(truth)


def answer_tokens(tokenizer, closing: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of the closing text, and those of the answer after it.

    Both are tokenized together, as the model would have read them: where a token holds the end of one and the beginning
    of the other, it belongs to the answer.
    """
    alone = tokenizer.encode(closing, add_special_tokens=False)
    both = tokenizer.encode(closing + answer, add_special_tokens=False)
    same = 0
    while same < min(len(alone), len(both) - 1) and alone[same] == both[same]:
        same += 1
    return both[:same], both[same:]


def needs_answers(config) -> str:
    """Return the key of a run's config that needs reference answers; empty if none does."""
    credit = credit_of(config.algorithm.adv_estimator)
    if credit and ANSWER_GAINS in credit.needs:
        return f"algorithm.adv_estimator={credit.name}"
    guides = (config.get("hato") or {}).get("local_reward") == ANSWER_LIKELIHOOD
    return f"hato.local_reward={ANSWER_LIKELIHOOD}" if guides else ""


def closing_text(config) -> str:
    """Return the text that closes a thought and opens an answer: `actor_rollout_ref.rollout.answer_closing`, or where
    that is null the one for the run's environment."""
    closing = config.actor_rollout_ref.rollout.get("answer_closing")
    if closing is not None:
        return closing
    return CLOSING_WITH_TOOLS if config.actor_rollout_ref.rollout.get("environment") == "tools" else CLOSING


@dataclass(eq=False)
class AnswerLikelihood:
    """How likely a prompt's reference answer is after beginnings of responses; each beginning is scored once.

    Args:
        score: of an engine; its weights are those that sample.
        prompt_ids: tokens of the prompt.
        tokenizer: the model's.
        closing: text that closes the thought and opens the answer.
        answers: reference answers, at least one; the most likely one counts.
    """

    score: ScoreTokens
    prompt_ids: Sequence[int]
    tokenizer: Any
    closing: str
    answers: Sequence[str]
    _found: dict[tuple[int, ...], asyncio.Task] = field(default_factory=dict)

    async def log_prob(self, response: Sequence[int]) -> float:
        """Return the mean log-probability in nats of the answer's tokens after a beginning of a response and the
        closing text."""
        beginning = tuple(response)
        if beginning not in self._found:
            self._found[beginning] = asyncio.ensure_future(self._best(beginning))
        return await self._found[beginning]

    async def _best(self, beginning: tuple[int, ...]) -> float:
        found = []
        for answer in self.answers:
            closing_ids, answer_ids = answer_tokens(self.tokenizer, self.closing, answer)
            found.append(fmean(await self.score([*self.prompt_ids, *beginning, *closing_ids], answer_ids)))
        return max(found)


async def answer_gains(tree: TrajectoryTree, likelihood: AnswerLikelihood, log_prob: bool = False) -> list[list[float]]:
    """Return for each of a tree's rows its `ANSWER_GAINS`: at the last token of each turn but the last one, by how much
    the turn has changed the answer's likelihood; NaN elsewhere.

    A turn ends with a tool's result, or with a step that the policy has marked (`SegmentInfo.ends_step`).

    Args:
        log_prob: gains of mean log-probabilities in nats instead of probabilities.
    """

    async def value(beginning: Sequence[int]) -> float:
        found = await likelihood.log_prob(beginning)
        return found if log_prob else math.exp(found)

    async def of_row(leaf: int) -> list[float]:
        path = tree.path(leaf)
        tokens: list[int] = []
        ends: list[int] = []
        for i in path:
            segment = tree.segments[i]
            tokens += segment.token_ids
            if i != path[-1] and (segment.author == TOOL or segment.info.ends_step):
                ends.append(len(tokens))
        values = await gather_or_cancel(*(value(tokens[:end]) for end in [0, *ends]))
        gains = [math.nan] * len(tokens)
        for end, (before, after) in zip(ends, pairwise(values), strict=True):
            gains[end - 1] = after - before
        return gains

    return await gather_or_cancel(*(of_row(leaf) for leaf in tree.leaves))
