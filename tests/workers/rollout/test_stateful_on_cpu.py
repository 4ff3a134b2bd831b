"""Environments with live instances: what becomes a copy or a replay, and what goes wrong. That a state is a value,
whichever branch is first and however few instances live, is tested for games too in tests/conformance.

Every instance checks that it gets one call at a time.
"""

import asyncio
import contextlib
import math

import pytest

from tests.workers.rollout.toy_engine import Game, GameInstance, game_step
from verl.utils.fault_reports import RunError
from verl.workers.rollout.environment import BranchLost
from verl.workers.rollout.stateful import Step

NEVER_DONE = lambda actions, _: Step(tuple(actions))  # noqa: E731


@contextlib.asynccontextmanager
async def played(game: Game):
    """Nothing of the game is left after it."""
    try:
        async with asyncio.timeout(60):
            yield game
    finally:
        await game.close()
        assert game.alive == game.pool.used == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_trajectory_has_one_instance_for_all_its_steps():
    async with played(Game(can_copy=True, fault=NEVER_DONE)) as game:
        state = None
        for action in range(5):
            state = await game.advance(state, (action, "no end"))
    assert len(state.path()) == 5
    metrics = game.metrics([])
    assert game.made == metrics["environment/instances"] == 1
    assert metrics["environment/copies"] == metrics["environment/replays"] == 0


async def branches_of_one_state(game: Game, n: int) -> set[Step]:
    async with played(game):
        state = await game.advance(None, (0,))
        return {(await game.advance(state, (1, branch))).step for branch in range(n)}


async def test_branches_of_one_state_are_copies_after_one_replay():
    game = Game(can_copy=True, fault=NEVER_DONE)
    assert len(await branches_of_one_state(game, 5)) == 5
    # the first branch has the live instance, the second one a replay, which is copied for each further one
    assert (game.counts["replays"], game.counts["copies"], game.counts["instances"]) == (1, 4, 2)
    game = Game(can_copy=False, fault=NEVER_DONE)
    assert len(await branches_of_one_state(game, 5)) == 5
    assert (game.counts["replays"], game.counts["replayed_actions"], game.counts["copies"]) == (4, 4, 0)


async def test_an_equal_action_at_an_equal_state_is_taken_once():
    async with played(Game(delay=0.01)) as game:
        states = await asyncio.gather(*(game.advance(None, (7,)) for _ in range(5)))
    assert len(set(states)) == 1 and game.made == 1


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hang", "a step of the environment failed: TimeoutError: no answer in 0.05 s"),
        (OSError("gone"), "OSError: gone"),
        (Step("x", math.nan), "the reward of a step is nan, expected a finite number"),
    ],
)
async def test_a_step_that_fails_or_hangs_loses_its_branch_only(fault, message):
    faulty = Game(fault=lambda actions, _: fault if actions[-1] == (1,) else None, timeout=0.05)
    async with played(faulty) as game:
        good = await game.advance(None, (0,))
        with pytest.raises(BranchLost, match=message):
            await game.advance(None, (1,))
        after = await game.advance(good, (2,))
    assert after.step == game_step([(0,), (2,)]) and game.counts["failures"] == 1


async def test_a_copy_that_fails_is_replaced_by_a_replay(monkeypatch):
    def fails(*_):
        raise ValueError("no memory")

    monkeypatch.setattr(GameInstance, "copy", fails)
    game = Game(can_copy=True, fault=NEVER_DONE)
    assert len(await branches_of_one_state(game, 3)) == 3
    assert game.counts["copies"] == 0 < game.counts["failures"]


async def test_copies_are_made_also_where_other_prompts_fill_the_pool():
    async with played(Game(can_copy=True, max_instances=8, fault=NEVER_DONE)) as game:
        for filler in range(8):  # idle instances of other branches
            await game.advance(None, ("filler", filler))
        state = await game.advance(None, (0,))
        for depth in range(10):
            state = await game.advance(state, (depth,))
        for branch in range(6):
            await game.advance(state, (99, branch))
    assert game.most_alive <= 8 and game.counts["copies"] >= 4


@pytest.mark.parametrize("cancelled_after", range(1, 7))
async def test_a_close_that_is_cancelled_closes_all_the_same(cancelled_after, monkeypatch):
    async def slow(self):
        await asyncio.sleep(0.01)
        self.game.alive -= 1

    monkeypatch.setattr(GameInstance, "close", slow)
    async with played(Game(delay=0.002)) as game:
        await asyncio.gather(*(game.advance(None, (i,)) for i in range(4)))
        running = asyncio.ensure_future(game.advance(None, (9,)))
        closing = asyncio.ensure_future(game.close())
        for _ in range(cancelled_after):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(running, closing, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert game.alive == game.pool.used == 0
        with pytest.raises(RuntimeError, match="this prompt's environment is closed"):
            await game.advance(None, (10,))


@pytest.mark.parametrize("what", ["create", "reset"])
async def test_other_failures_lose_the_branch_and_free_its_place(what, monkeypatch):
    def fails(*_):
        raise ValueError("no license")

    async with played(Game(can_copy=True, max_instances=3, fault=NEVER_DONE)) as game:
        state = await game.advance(None, (0,))
        first = await game.advance(state, (1,))
        monkeypatch.setattr(*{"create": (game, "create", fails)}.get(what, (GameInstance, what, fails)))
        with pytest.raises(BranchLost, match="ValueError: no license"):
            await game.advance(state, (2,))
    assert first.step.observation == ((0,), (1,))


async def test_replays_that_differ_lose_their_branches_and_more_than_a_tenth_of_them_end_the_run():
    async with played(Game(fault=lambda actions, made: Step((*actions, made)))) as game:
        state = await game.advance(None, (0,))
        await game.advance(state, (1,))
        for branch in range(19):
            with pytest.raises(BranchLost, match="a replay of 1 actions returned something else"):
                await game.advance(state, (2, branch))
        assert game.metrics([])["environment/replay_differs"] == 19
        with pytest.raises(RunError, match="20 of 20 replays of the environment differed .* choose tree=plain"):
            await game.advance(state, (3,))


async def test_an_instance_that_does_not_close_is_given_up(monkeypatch):
    async def never(self):
        self.game.alive -= 1
        await asyncio.sleep(60)

    monkeypatch.setattr(GameInstance, "close", never)
    monkeypatch.setattr("verl.workers.rollout.stateful.CLOSE_SECONDS", 0.05)
    async with played(Game()) as game:
        await game.advance(None, (0,))
