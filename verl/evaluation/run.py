"""Asks a model every question n times, scores the answers and keeps each sample.

    read_questions -> samples that the file lacks -> asked, many at once -> scored -> SampleFile -> metrics

A sample's seed is derived from the run's seed, the question and the sample's number, so that an interrupted run asks
for the remaining samples with the same seeds.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from verl.evaluation.model.server import ChatModel, DoesNotFit, ServerEngine
from verl.evaluation.questions.prompts import Question, prompt_ids_of
from verl.evaluation.scores.sample_file import SampleFile
from verl.evaluation.scores.scoring import Scored
from verl.workers.rollout.contexts import ContextRule
from verl.workers.rollout.engines.interface import GenerationRequest, gather_or_cancel
from verl.workers.rollout.environment import NO_ENVIRONMENT, BranchLost, Environment
from verl.workers.rollout.trajectory_tree import TOOL
from verl.workers.rollout.tree_builder import BranchPolicy, Ended, Path, Sampling, TreeBuilder, grow


class Response(NamedTuple):
    """A response; None stands for what is unknown or does not apply."""

    text: str
    tokens: int  # number of tokens that the model generated
    tool_calls: int | None = None
    reward: float | None = None  # the environment's
    lost: str = ""  # why the response is empty and wrong: the environment has lost it, or the question does not fit
    cut: bool | None = None  # whether it ended at a limit of tokens or tool calls

    @property
    def scored_by_environment(self) -> Scored | None:
        """The environment's reward, cut to [0, 1], or the 0 of a lost response; None for any other response."""
        more: dict[str, Any] = {} if self.reward is None else {"reward": self.reward}
        more |= {"lost": self.lost} if self.lost else {}
        return Scored(min(max(self.reward or 0.0, 0.0), 1.0), "", more) if more else None


# a question and a seed -> the model's response
Responder = Callable[[Question, int], Awaitable[Response]]
# a question and the text of a response -> its score
Scorer = Callable[[Question, str], Awaitable[Scored]]


class OneResponse(BranchPolicy):
    """The policy of an evaluation: one response, as `tree=plain` samples it. `ended` says why it has ended."""

    ended: Ended | None = None

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        response = await builder.continue_to_end(Path(), random.Random(builder.seed).getrandbits(31))
        self.ended = response.ended
        builder.tree.leaves = [builder.tree.insert(None, response.segments)]


def token_responder(
    engine: ServerEngine,
    tokenizer,
    template: Mapping,
    sampling: Mapping,
    stop_token_ids: list[int],
    environment: Environment,
    context: int | None,
    rule: ContextRule | None = None,
) -> Responder:
    """Return a responder that exchanges token ids with the model in an environment, as training does.

    Args:
        sampling: temperature, top_p, top_k, stop (without an environment) and max_tokens, the limit of a response
            including the environment's answers.
        context: largest number of tokens that a turn reads and writes together; None: the server limits them.
        rule: names the part of earlier turns that a turn reads; None for all.
    """
    options = {name: sampling[name] for name in ("temperature", "top_p", "top_k")}

    async def respond(question: Question, seed: int) -> Response:
        async with environment.opened({"extra_info": {"environment": question.task}}, seed) as opened:
            try:
                return await respond_in(opened, question, seed)
            except BranchLost as error:
                return Response("", 0, reward=0.0, lost=str(error))

    async def respond_in(opened: Environment, question: Question, seed: int) -> Response:
        messages = await opened.first_messages(question.prompt)
        prompt_ids = prompt_ids_of(tokenizer, messages, template, opened.schemas)
        max_tokens = limit = sampling["max_tokens"]
        if context is not None:
            limit = min(max_tokens, context - len(prompt_ids))
        if limit < 1:
            raise DoesNotFit(f"question {question.id}: its {len(prompt_ids)} tokens leave no room in {context}")
        limits: dict[str, Any] = {"max_tokens": limit, "stop_token_ids": stop_token_ids, "seed": seed}
        if environment is NO_ENVIRONMENT:
            request = GenerationRequest(prompt_ids, **limits, **options, stop=sampling["stop"])
            generation = await engine.generate(request)
            token_ids, text = generation.token_ids, tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            cut = len(token_ids) >= limit and not generation.stopped and not any(stop in text for stop in request.stop)
            return Response(text, len(token_ids), cut=cut)
        settings, policy = Sampling(**options), OneResponse()
        if rule is not None:
            limits |= {"max_tokens": max_tokens, "max_model_len": context, "context_rule": rule}
        tree = await grow(engine, prompt_ids, 1, policy, environment=opened, sampling=settings, **limits)
        text = tokenizer.decode(tree.trajectories()[0], skip_special_tokens=True)
        tokens, rewards = sum(tree.response_masks()[0]), tree.turn_rewards
        reward = math.fsum(rewards[0].values()) if rewards else None
        calls = None if rewards else sum(segment.author == TOOL for segment in tree.segments)
        cut = policy.ended in (Ended.LENGTH, Ended.CALL_LIMIT)
        return Response(text, tokens, calls, reward, cut=cut)

    return respond


def chat_responder(model: ChatModel, sampling: Mapping, template: Mapping) -> Responder:
    """Return a responder for a model behind a chat API, without tools; see `token_responder` for the options."""
    options = {name: value for name, value in sampling.items() if name != "stop" or value}
    if template:
        options["chat_template_kwargs"] = dict(template)

    async def respond(question: Question, seed: int) -> Response:
        text, tokens, cut = await model.ask(question.prompt, seed=seed, **options)
        return Response(text, tokens, cut=cut)

    return respond


def seed_of(seed: int, question: str, sample: int) -> int:
    return random.Random(f"{seed} {question} {sample}").getrandbits(31)


def missing(questions: Sequence[Question], n: int, samples: SampleFile) -> list[tuple[Question, int]]:
    """Return the questions and sample numbers that the file lacks."""
    return [(question, i) for question in questions for i in range(n) if (question.id, i) not in samples.rows]


async def collect(
    respond: Responder,
    score: Scorer,
    questions: Sequence[Question],
    n: int,
    samples: SampleFile,
    seed: int,
    at_once: int,
) -> None:
    """Ask for the samples that the file lacks, `at_once` at a time, and score them. The first failure stops it, and
    finished samples are kept."""
    todo, total = missing(questions, n, samples), len(questions) * n
    bar = tqdm(total=total, initial=total - len(todo), unit="sample", desc=samples.path.stem)
    slots = asyncio.Semaphore(at_once)
    scores = [row["score"] for row in samples.rows.values() if row["score"] is not None]
    right, scored_so_far = sum(scores), len(scores)

    async def ask_and_score(question: Question, number: int) -> None:
        nonlocal right, scored_so_far
        async with slots:
            started = time.monotonic()
            try:
                response = await respond(question, seed_of(seed, question.id, number))
            except DoesNotFit as error:
                response = Response("", 0, lost=str(error), cut=False)
            scored = response.scored_by_environment or await score(question, response.text)
        row = {"question": question.id, "sample": number, "score": scored.score, "answer": scored.answer, **scored.more}
        row |= {"tokens": response.tokens, "tool_calls": response.tool_calls, "response": response.text}
        row["cut"] = response.cut
        samples.add(row | {"seconds": round(time.monotonic() - started, 3)})
        if scored.score is not None:
            right, scored_so_far = right + scored.score, scored_so_far + 1
        bar.set_postfix(accuracy=f"{right / max(1, scored_so_far):.3f}", refresh=False)
        bar.update()

    with bar:
        await gather_or_cancel(*(ask_and_score(question, number) for question, number in todo))
