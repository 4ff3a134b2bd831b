"""`environment.url`: a real OpenEnv server answers trees, has too few sessions, fails, and is killed."""

import asyncio
import contextlib
import time

import pytest

from recipe.common.tree import Policy as Plain
from tests.workers.rollout.gym.openenv_servers import openenv_server
from tests.workers.rollout.gym.test_environment_on_cpu import TOKENIZER, Player, grown, worker
from verl.evaluation.model.server import free_port
from verl.workers.rollout.environment import BranchLost
from verl.workers.rollout.gym.environment import GymKeys
from verl.workers.rollout.run_environment import try_gym
from verl.workers.rollout.stateful import Step
from verl.workers.rollout.tree_builder import grow

ROW = {"extra_info": {"environment": {"goal": 3}}}


@pytest.fixture(scope="module")
def words():
    with openenv_server() as server:
        yield server


@contextlib.asynccontextmanager
async def on_server(url, row=ROW, **keys):
    """The environment of a prompt, after which no session is left."""
    gym = worker(url=url, **keys)
    async with asyncio.timeout(60), gym.opened(row, 7) as opened:
        yield opened
    assert gym.pool.used == 0


async def actions(environment, *texts):
    """The results of actions from the first state on."""
    state, steps = None, []
    for text in texts:
        state = await environment.advance(state, text)
        steps.append(state.step)
    return steps


async def test_branches_have_sessions_of_their_own(words):
    async with on_server(words.url) as environment:
        assert (await environment.first_state()).step == Step("goal 3, seed 7")
        branches = [actions(environment, "ab", *ends) for ends in (("c", "d"), ("de", "f"))]
        steps = await asyncio.gather(*branches)
    assert steps == [
        [Step("ab: 2", 1.0), Step("ab c: 3", 0.0), Step("ab c d: 4", 1.0, True)],
        [Step("ab: 2", 1.0), Step("ab de: 4", 1.0), Step("ab de f: 5", 0.0, True)],
    ]


async def test_a_seed_of_the_task_comes_first(words):
    async with on_server(words.url, {"extra_info": {"environment": {"goal": 2, "seed": 40}}}) as environment:
        assert (await environment.first_state()).step.observation == "goal 2, seed 40"


async def test_a_step_that_the_server_cannot_make_loses_its_branch_only(words):
    async with on_server(words.url) as environment:
        with pytest.raises(BranchLost, match=r"a step of the environment failed: .*no such word \(EXECUTION_ERROR\)"):
            await actions(environment, "ab", "fail")
        assert (await actions(environment, "ab", "c"))[-1] == Step("ab c: 3", 0.0)


@pytest.mark.parametrize(("text", "heard"), [('{"word": "abc"}', "abc: 3"), ('{"x": 1}', '{"x": 1}: 8'), ("7", "7: 1")])
async def test_an_object_with_the_text_field_is_the_action_and_any_other_text_its_value(words, text, heard):
    async with on_server(words.url) as environment:
        (step,) = await actions(environment, text)
    assert step.observation == heard


async def test_an_action_of_another_type_is_answered_and_not_seen_by_the_game(words):
    async with on_server(words.url) as environment:
        step, after = await actions(environment, '{"word": 3}', "ab")
    assert step == Step("Error: word: Input should be a valid string") and after == Step("ab: 2", 1.0)


async def test_without_a_text_field_actions_and_observations_are_objects():
    with openenv_server("moves") as server:
        async with on_server(server.url) as environment:
            steps = await actions(environment, '{"dx": 2}', "left", '{"dz": 1}', '{"dx": 1, "dy": 3}')
    assert steps == [
        Step('{"x": 2, "y": 0}', 1.0),
        Step("Error: write your action as a JSON object with dx, dy"),
        Step("Error: dx: Field required; dz: Extra inputs are not permitted"),
        Step('{"x": 3, "y": 3}', 1.0),
    ]


# ---- fewer sessions than instances ----


def test_trees_share_a_server_with_two_sessions_and_nothing_is_lost(words):
    """All trajectories end at their limits of tokens, so that those at the ends of games could keep their sessions."""
    row = {"extra_info": {"environment": {"goal": 50}}}

    def trees(url):
        async def run():
            gym = worker(url=url, timeout=1.0)

            async def tree(seed):
                async with gym.opened(row, seed) as opened:
                    options = {"stop_token_ids": [TOKENIZER.eos_token_id], "vocab_size": 300, "seed": seed}
                    tree = await grow(Player(), [1], 5, Plain(), environment=opened, max_tokens=120, **options)
                return tree.trajectories(), tree.metrics["environment/failures"]

            return await asyncio.gather(*map(tree, range(3)))

        return asyncio.run(run())

    with openenv_server(max_sessions=2) as server:
        assert trees(server.url) == trees(words.url)
        assert all(len(rows) == 5 and failures == 0 for rows, failures in trees(server.url))


async def test_a_prompt_waits_for_sessions_of_others_beyond_the_time_limit_of_a_call():
    with openenv_server(max_sessions=1) as server:
        trial = await asyncio.to_thread(try_gym, GymKeys(url=server.url), {"goal": 2}, ["ab", "c"])
        assert len(trial) == 3
        async with on_server(server.url, timeout=0.5) as environment:
            async with worker(url=server.url).opened(ROW, 8) as held:
                await held.first_state()
                waiting = asyncio.ensure_future(actions(environment, "ab"))
                await asyncio.sleep(0.6)
                assert not waiting.done()
                with pytest.raises(ValueError, match="environment.url=.*: Server at capacity: 1/1 sessions active"):
                    await asyncio.to_thread(try_gym, GymKeys(url=server.url), {})
            assert await waiting == [Step("ab: 2", 1.0)]


# ---- the server ends ----


def test_a_server_that_stays_down_loses_its_trees_by_name_and_the_next_prompts_find_the_new_one():
    class Kills(Player):
        async def generate(self, request):
            if len(self.asked) == 7:
                server.kill()
            return await super().generate(request)

    with openenv_server() as server:
        gym, down = worker(url=server.url, timeout=2), f"ServerDown: no OpenEnv server answers at {server.url}"
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=f"the environment lost every trajectory: .*{down}"):
            grown(gym, Kills(), row=ROW, n=8)
        assert 2 < time.monotonic() - started < 14  # for all trajectories together
        with pytest.raises(BranchLost, match=f"the environment could not be made: {down}"):
            grown(worker(url=server.url, timeout=0.1), row=ROW)
        server.start()
        assert len(grown(gym, row=ROW)[1].leaves) == len(grown(worker(url=server.url), row=ROW)[1].leaves) == 4


async def test_calls_of_a_server_that_is_started_again_are_made_again():
    """Steps, attempts to open a session, and a reset are under way when it ends."""

    async def first_of(row):
        async with worker(url=server.url).opened(row, 8) as opened:
            return (await opened.first_state()).step.observation

    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(openenv_server())
        environment = await stack.enter_async_context(on_server(server.url))
        state = await environment.advance(None, "ab")
        first = asyncio.ensure_future(first_of({"extra_info": {"environment": {"seconds": 1}}}))
        await asyncio.sleep(0.3)
        server.pause()
        going_on = asyncio.gather(*(environment.advance(state, word) for word in ("c", "de")))
        await asyncio.sleep(0.3)
        server.kill()
        await asyncio.sleep(0.3)
        assert not going_on.done()
        await asyncio.to_thread(server.start)
        steps = [after.step for after in await going_on]
        assert steps == [Step("ab c: 3", 0.0), Step("ab de: 4", 1.0)]
        assert environment.counts["replays"] == 2 and await first == "goal 3, seed 8"


def test_a_trial_names_the_key(words):
    try_gym(GymKeys(url=words.url), {"goal": 1})
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"environment.url={url}: no OpenEnv server answers"):
        try_gym(GymKeys(url=url), {})
    with pytest.raises(ValueError, match=f"environment.url={words.url}/docs: no OpenEnv server .*404"):
        try_gym(GymKeys(url=f"{words.url}/docs"), {})
    with pytest.raises(ValueError, match="url"):
        GymKeys(url="127.0.0.1:8000")
    with pytest.raises(ValueError, match="extra_info.environment='x': an OpenEnv server takes an object"):
        try_gym(GymKeys(url=words.url), "x")
