"""Asks a model every question n times, scores the answers, keeps each sample, and measures.

    read_questions -> samples that the file lacks -> asked, many at once -> scored -> SampleFile -> metrics

A sample's seed follows from the run's seed, the question and the sample's number, so that a run that was interrupted
asks for the remaining samples with the same seeds.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol as Interface

from tqdm import tqdm

from verl.evaluation import metrics
from verl.evaluation.questions import Question
from verl.evaluation.results import INTERVAL_ENDS, EvalResult
from verl.evaluation.sample_file import SampleFile
from verl.evaluation.scoring import Judge, Scored, by_rule
from verl.evaluation.server import ChatModel
from verl.workers.rollout import growth
from verl.workers.rollout.environment import Tools
from verl.workers.rollout.rollout_engine import RolloutEngine
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox
from verl.workers.rollout.trajectory_tree import TOOL
from verl.workers.rollout.trees.plain import Policy as Plain


@dataclass(frozen=True)
class Response:
    """An answer: its text, the number of tokens that the model wrote, and of its tool calls (None: it has no tools)."""

    text: str
    tokens: int
    tool_calls: int | None = None


class Responder(Interface):
    async def respond(self, question: Question, seed: int) -> Response: ...


@dataclass(frozen=True)
class Sampling:
    """How a model samples; `max_tokens` limits a response and includes tool results."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


class TokenResponder:
    """A model that gets and gives token ids, as in training, with or without tools.

    Args:
        engine: of the server.
        tokenizer: of the model; its chat template makes the prompt.
        stop_token_ids: any of them ends a response.
        tools: None: the model answers in one turn.
        context: the most tokens of prompt and response together; None: the server limits them.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer,
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        tools: ToolBox | None = None,
        context: int | None = None,
    ):
        self.engine, self.tokenizer, self.sampling = engine, tokenizer, sampling
        self.stop_token_ids, self.context = list(stop_token_ids), context
        self.options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        self.environment = None if tools is None else Tools(tools, Protocol(tokenizer, list(tools.tools)))

    async def respond(self, question: Question, seed: int) -> Response:
        prompt_ids = self.tokenizer.apply_chat_template(
            question.prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        max_tokens = self.sampling.max_tokens
        if self.context is not None:
            max_tokens = min(max_tokens, self.context - len(prompt_ids))
        if max_tokens < 1:
            raise ValueError(f"question {question.id}: its {len(prompt_ids)} tokens leave no room in {self.context}")
        limits = {"max_tokens": max_tokens, "stop_token_ids": self.stop_token_ids}
        if self.environment is None:
            made = await self.engine.generate(prompt_ids, seed=seed, **limits, **self.options)
            return Response(self._text(made.token_ids), len(made.token_ids))
        tree = await growth.grow(
            self.engine,
            prompt_ids,
            1,
            Plain(),
            environment=self.environment,
            sampling=growth.Sampling(**self.options),
            seed=seed,
            **limits,
        )
        calls = sum(segment.author == TOOL for segment in tree.segments)
        return Response(self._text(tree.trajectories()[0]), sum(tree.response_masks()[0]), calls)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


class ChatResponder:
    """A model behind a chat API: without tools, and without top_k, which that API does not have."""

    def __init__(self, model: ChatModel, sampling: Sampling):
        self.model = model
        self.options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}

    async def respond(self, question: Question, seed: int) -> Response:
        text, tokens = await self.model.ask(question.prompt, seed=seed, **self.options)
        return Response(text, tokens)


def seed_of(seed: int, question: str, sample: int) -> int:
    return random.Random(f"{seed} {question} {sample}").getrandbits(31)


def missing(questions: Sequence[Question], n: int, samples: SampleFile) -> list[tuple[Question, int]]:
    """Questions and sample numbers that the file lacks."""
    return [(question, i) for question in questions for i in range(n) if (question.id, i) not in samples.rows]


async def collect(
    responder: Responder,
    questions: Sequence[Question],
    n: int,
    samples: SampleFile,
    *,
    scoring: str,
    judge: Judge | None = None,
    seed: int = 0,
    at_once: int = 64,
) -> None:
    """Ask for the samples that the file lacks, and score them. The first failure ends this; earlier samples stay.

    Args:
        scoring: of the benchmark; `judge` needs a judge.
        at_once: the most samples that are asked for or scored at the same time.
    """
    todo, total = missing(questions, n, samples), len(questions) * n
    bar = tqdm(total=total, initial=total - len(todo), unit="sample", desc=samples.path.stem)
    slots = asyncio.Semaphore(at_once)
    known = [row["score"] for row in samples.rows.values() if row["score"] is not None]
    right, scored_so_far = sum(known), len(known)

    async def ask_and_score(question: Question, number: int) -> None:
        nonlocal right, scored_so_far
        async with slots:
            started = time.monotonic()
            response = await responder.respond(question, seed_of(seed, question.id, number))
            scored = await _score(question, response, scoring, judge)
        row = {"question": question.id, "sample": number, "score": scored.score, "answer": scored.answer, **scored.more}
        row |= {"tokens": response.tokens, "tool_calls": response.tool_calls, "response": response.text}
        samples.add(row | {"seconds": round(time.monotonic() - started, 3)})
        if scored.score is not None:
            right, scored_so_far = right + scored.score, scored_so_far + 1
        bar.set_postfix(accuracy=f"{right / max(1, scored_so_far):.3f}", refresh=False)
        bar.update()

    tasks = [asyncio.create_task(ask_and_score(question, number)) for question, number in todo]
    try:
        for task in asyncio.as_completed(tasks):
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        bar.close()


async def _score(question: Question, response: Response, scoring: str, judge: Judge | None) -> Scored:
    if scoring == "judge":
        return await judge.score(question, response.text)
    return await asyncio.to_thread(by_rule, question, scoring, response.text)


def measure(
    samples: SampleFile, questions: Sequence[Question], n: int, ks: Sequence[int]
) -> dict[str, metrics.Estimate]:
    """Metrics of the first n samples of each question, with token F1 if the answers have one."""
    wanted = [samples.rows[question.id, number] for question in questions for number in range(n)]
    rows = [
        metrics.Sample(
            question=row["question"],
            score=row["score"],
            answer=row["answer"],
            tokens=row["tokens"],
            tool_calls=row["tool_calls"],
        )
        for row in wanted
    ]
    estimates = metrics.measure(rows, ks)
    if wanted and "f1" in wanted[0]:
        f1 = [row.get("f1", 0.0) for row in wanted]
        estimates["F1-Mean"] = metrics.estimate([fmean(f1[at : at + n]) for at in range(0, len(f1), n)])
    return estimates


def result_of(
    estimates: dict[str, metrics.Estimate], *, experiment: str, step: int | None, dataset: str, n: int, n_questions: int
) -> EvalResult:
    """Values and the ends of their intervals, under names that `scripts/read_log.py` reads."""
    numbers = {name: estimate.value for name, estimate in estimates.items()}
    for name, estimate in estimates.items():
        if name.startswith(("Acc-", "F1-")):
            ends = zip(INTERVAL_ENDS, (estimate.low, estimate.high), strict=True)
            numbers |= {f"{name}{end}": value for end, value in ends}
    return EvalResult(
        experiment=experiment, step=step, dataset=dataset, n_samples=n, n_questions=n_questions, metrics=numbers
    )


def sample_path(output_dir: str | Path, experiment: str, step: int | None, benchmark: str) -> Path:
    folder = Path(output_dir) / experiment
    return (folder if step is None else folder / f"step_{step}") / f"{benchmark}.jsonl"
