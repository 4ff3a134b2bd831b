"""What becomes of a group: its status, whatever happens in it. The queue and the scorer are stand-ins here; the whole
path on the real stack is in tests/e2e."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig

from verl.workers.rollout import group_rollout
from verl.workers.rollout.group_rollout import GROUP_ROLLOUTS, GroupAgentLoopWorker, group_rollout_class
from verl.workers.rollout.trees.over_generation import most_diverse

Worker = GroupAgentLoopWorker.__ray_metadata__.modified_class


class Rollout:
    async def run(self, prompt, n, sampling_params):
        await asyncio.sleep(0)
        if prompt["uid"] == "raises":
            raise ValueError("no such token")
        if prompt["uid"] == "stuck":
            await asyncio.sleep(60)
        return [f"{prompt['uid']} {i}" for i in range(n - (prompt["uid"] == "too few"))]


@pytest.fixture
def queue(monkeypatch):
    """(uid, status) in the order in which they were published, and a worker whose sessions go to `put`."""
    published, put = [], []

    async def async_kv_put(key, partition_id, tag):
        assert partition_id == "train"
        published.append((key, tag["status"]))

    async def postprocess(output, validate, **kwargs):
        if kwargs["uid"] == "unscored" and kwargs["session_id"] == 0:
            raise RuntimeError("the reward function failed")
        await asyncio.sleep(0.01)
        put.append((kwargs["uid"], kwargs["session_id"], output, "__do_sample__" in kwargs))

    async def async_kv_list(partition_id):
        return {partition_id: {f"{uid}_{session}_0": {} for uid, session, _, _ in put}}

    async def async_kv_clear(keys, partition_id):
        put[:] = [row for row in put if f"{row[0]}_{row[1]}_0" not in keys]

    monkeypatch.setattr(group_rollout.tq, "async_kv_put", async_kv_put)
    monkeypatch.setattr(group_rollout.tq, "async_kv_list", async_kv_list)
    monkeypatch.setattr(group_rollout.tq, "async_kv_clear", async_kv_clear)
    worker = Worker.__new__(Worker)
    worker.group_rollout, released = Rollout(), []
    worker.engine = SimpleNamespace(release=released.append, released=released)
    worker.config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=DictConfig({"n": 3, "group_timeout": 0.5}))
    )
    worker._agent_loop_postprocess = postprocess
    return worker, published, put


def run(worker, uids):
    async def groups():
        await asyncio.gather(
            *(worker._run_prompt({"uid": uid, "agent_name": "x"}, {}, {"validate": False}) for uid in uids)
        )

    asyncio.run(groups())


def test_a_failing_group_fails_alone(queue):
    worker, published, put = queue
    run(worker, ["raises", "fine", "too few", "stuck"])
    assert dict(published) == {"raises": "failure", "fine": "finished", "too few": "failure", "stuck": "failure"}
    assert [(uid, session) for uid, session, _, _ in put] == [("fine", 0), ("fine", 1), ("fine", 2)]
    assert sorted(worker.engine.released) == ["fine", "raises", "stuck", "too few"], "every group gives its server back"


def test_a_groups_status_comes_after_its_last_session(queue):
    worker, published, put = queue
    run(worker, ["unscored"])
    assert published == [("unscored", "running"), ("unscored", "failure")]
    assert put == [], "half a group is none"


def test_seeds_differ_by_row_step_and_run_also_without_an_index():
    def seed(text="a", index=0, step=1, run=0):
        config = DictConfig({"actor_rollout_ref": {"rollout": {"seed": run}}})
        prompt = {"raw_prompt": [{"role": "user", "content": text}], "index": index, "global_steps": step}
        return group_rollout.GroupRollout.seed_of(SimpleNamespace(config=config), prompt)

    # upstream gives index 0 to every row without one
    assert len({seed(), seed("b"), seed(index=1), seed(step=2), seed(run=1)}) == 5
    assert seed() == seed()


def test_rollout_names():
    assert group_rollout_class("vllm") is None
    assert all(group_rollout_class(name).__module__ in path for name, path in GROUP_ROLLOUTS.items())


def test_the_most_diverse_by_hand():
    responses = [[1, 2, 3, 4], [1, 2, 3, 5], [6, 7, 8, 9], [1, 2, 8, 9]]
    # first 0; farthest from it is 2 (4/4); then 3 (2/4 from both) before 1 (1/4 from 0)
    assert most_diverse(responses, 2) == [0, 2] and most_diverse(responses, 3) == [0, 2, 3]
    assert most_diverse(responses, 4) == [0, 1, 2, 3] and most_diverse([[1]] * 3, 2) == [0, 1]
