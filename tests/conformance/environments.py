"""Tests that hold for every environment, whatever answers: a state is a value, and nothing is left behind.

from tests.conformance.environments import *  # noqa: F403

@pytest.fixture(params=[Case(make_my_environment, [[5, 2], [7, 2]], end_tokens={2})])
def case(request):
    return request.param
"""

import asyncio
import gc
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from recipe.common.tree import Policy as Plain
from verl.workers.rollout.engines.interface import Generation, GenerationRequest
from verl.workers.rollout.environment import Answer, BranchLost, Ends, Environment
from verl.workers.rollout.tree_builder import grow
from verl.workers.rollout.tree_rollout import rows_of

MANY = 2000  # tokens, more than any answer of the cases


class Case(NamedTuple):
    """An environment."""

    make: Callable[[int], Environment]  # makes the environment of a worker with this number of instances
    turns: Sequence[Sequence[int]]  # three or more that it answers, or none for an environment that never answers
    end_tokens: Collection[int]  # with which the model ends a response
    decode: Callable[[Sequence[int]], str] = str  # where turns end with a text
    row: Mapping[str, Any] = {}  # a row of the data set
    count_alive: Callable[[], int] = lambda: 0  # live instances and servers, seen from outside


def in_environments(case: Case, play, max_instances: int = 2):
    """Return what `play(open_environment)` returns, where `async with open_environment()` gives the environment of a
    prompt; nothing is left after it."""

    async def run():
        alive, worker, pools = case.count_alive(), case.make(max_instances), []

        @asynccontextmanager
        async def open_environment():
            async with worker.opened(case.row, 7) as environment:
                pools.extend([environment.pool] if hasattr(environment, "pool") else [])
                yield environment

        try:
            return await asyncio.wait_for(play(open_environment), 60)
        finally:
            assert not any(pool.used for pool in pools)
            await worker.stop()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            deadline = time.monotonic() + 10
            while case.count_alive() > alive:
                assert time.monotonic() < deadline, "instances are left"
                await asyncio.sleep(0.02)

    gc.collect()  # instances of earlier tests
    return asyncio.run(run())


def content(answer: Answer | None):
    """Return what the model and the trainer see of an answer."""
    calls = answer and [(call["tool"], call.get("ok")) for call in answer.calls]
    return answer and (answer.tokens, answer.done, answer.reward, calls)


async def answers_of(environment: Environment, turns: Sequence[Sequence[int]]) -> list[Answer]:
    """Return the answers to turns, one after another; fewer if the trajectory is done."""
    answers: list[Answer] = []
    for turn in turns:
        if answers and answers[-1].done:
            break
        answers.append(await environment.answer(answers[-1].state if answers else None, turn, MANY))
    return answers


# ---- a state is a value ----


@pytest.mark.parametrize(("max_instances", "seed"), [(1, 0), (3, 1), (64, 2)])
def test_branches_in_any_order_get_the_answers_of_straight_runs(case, max_instances, seed):
    """Each path of a random tree, whose answers are asked for at once, is played again in an environment of its own."""
    draw = random.Random(seed)
    tree = [(draw.randrange(i // 3 + 1), draw.choice(case.turns)) for i in range(18 * bool(case.turns))]
    paths: list[list[Sequence[int]]] = [[]]
    for before, turn in tree:
        paths.append([*paths[before], turn])

    async def play(open_environment):
        answers = [asyncio.get_running_loop().create_future() for _ in paths]
        answers[0].set_result(Answer([]))

        async def branch(environment, i, before, turn):
            at = await answers[before]
            await asyncio.sleep(draw.random() * 0.01)
            is_over = at is None or at.done
            answers[i].set_result(None if is_over else await environment.answer(at.state, turn, MANY))

        async with open_environment() as environment:
            await asyncio.gather(*(branch(environment, i, *edge) for i, edge in enumerate(tree, 1)))
        for path, answer in zip(paths[1:], answers[1:], strict=True):
            async with open_environment() as environment:
                straight = await answers_of(environment, path)
            expected = straight[-1] if len(straight) == len(path) else None
            assert content(await answer) == content(expected), path

    in_environments(case, play, max_instances)


def test_an_answer_has_at_most_so_many_tokens_and_leads_to_the_same_state(case):
    async def play(open_environment):
        for turn in case.turns:
            async with open_environment() as environment:
                whole, *after = await answers_of(environment, [turn, case.turns[-1]])
            for max_tokens in {0, 1, 2, 5, max(len(whole.tokens) - 1, 0), len(whole.tokens)}:
                async with open_environment() as environment:
                    answer = await environment.answer(None, turn, max_tokens)
                    assert len(answer.tokens) <= max_tokens and answer.done == whole.done
                    if max_tokens == len(whole.tokens):
                        assert content(answer) == content(whole)
                    if after:
                        answer = await environment.answer(answer.state, case.turns[-1], MANY)
                        assert content(answer) == content(after[0])

    in_environments(case, play)


# ---- turns ----


def test_a_turn_ends_with_its_last_token_where_a_continuation_stops(case):
    async def play(open_environment):
        async with open_environment() as environment:
            ends = {*case.end_tokens, *environment.stop_token_ids}
            for turn in case.turns:
                assert environment.ends(turn, case.end_tokens) == (Ends.TURN, len(turn))
                for end in range(len(turn)):
                    assert environment.ends(turn[:end], case.end_tokens) == (Ends.NO, end)
                    assert turn[end] not in ends or end == len(turn) - 1
                stops = environment.stops(turn[:1])
                assert turn[-1] in ends or any(text in case.decode(turn) for text in stops)
            if not case.turns:
                (end, *_) = case.end_tokens
                assert environment.ends([end], case.end_tokens) == (Ends.TRAJECTORY, 1)

    in_environments(case, play)


def test_whatever_ends_a_turn_is_answered_or_loses_its_branch(case):
    """Turns of random tokens before the end of one that is answered."""
    draw = random.Random(0)

    async def play(open_environment):
        async with open_environment() as environment:
            for _ in range(20 * bool(case.turns)):
                turn = draw.choice(case.turns)
                garbled = [draw.choice(turn[:-1] or turn) for _ in range(draw.randrange(8))] + list(turn[-1:])
                if environment.ends(garbled, case.end_tokens) == (Ends.TURN, len(garbled)):
                    try:
                        answer = await environment.answer(None, garbled, MANY)
                    except BranchLost:
                        continue
                    assert len(answer.tokens) <= MANY and answer.done in (False, True)

    in_environments(case, play)


class TurnsEngine:
    """Writes one of some turns, by the request's seed."""

    def __init__(self, turns: Sequence[Sequence[int]]):
        self.turns = turns

    async def generate(self, request: GenerationRequest) -> Generation:
        tokens = list(random.Random(request.seed).choice(self.turns))[: request.max_tokens]
        return Generation(tokens, [-1.0] * len(tokens), stopped=tokens[-1] in request.stop_token_ids)


def test_the_models_tokens_stay_in_the_rows_as_they_were_sampled(case):
    turns = list(case.turns) or [[*case.end_tokens][:1]]

    async def play(open_environment):
        options = {"max_tokens": 200, "stop_token_ids": [*case.end_tokens], "vocab_size": 10**6}
        async with open_environment() as environment:
            tree = await grow(TurnsEngine(turns), [1], 6, Plain(), environment=environment, **options)
        rows = rows_of(tree, Plain())
        assert len(rows) == 6
        for row in rows:
            written: list[list[int]] = [[]]
            for token, by_model in zip(row.response_ids, row.response_mask, strict=True):
                if by_model:
                    written[-1].append(token)
                elif written[-1]:
                    written.append([])
            *whole, last = written
            assert all(turn in map(list, turns) for turn in whole)
            assert any(list(turn[: len(last)]) == last for turn in turns)

    in_environments(case, play)


# ---- what is left ----


@pytest.mark.parametrize("how", ["error", "close", "cancel at once", "cancel", "cancel later"])
def test_nothing_is_left_whatever_ends_a_prompt(case, how):
    async def play(open_environment):
        asked = []

        async def prompt():
            async with open_environment() as environment:
                asked.extend(asyncio.ensure_future(answers_of(environment, [turn] * 3)) for turn in case.turns)
                if how == "error":
                    raise ValueError("the policy's")
                if how != "close":
                    await asyncio.gather(*asked, asyncio.sleep(60))
                await asyncio.sleep(0.01)

        running = asyncio.ensure_future(prompt())
        if how.startswith("cancel"):
            await asyncio.sleep({"cancel at once": 0, "cancel": 0.005, "cancel later": 0.3}[how])
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        _, left = await asyncio.wait(asked, timeout=5) if asked else ([], [])
        assert not left, "answers that nobody waits for end by themselves"

    in_environments(case, play)


__all__ = ["Case", *(name for name in dir() if name.startswith("test_"))]
