"""What becomes of a group: its status, its rows, its seeds.

The queue and the scorer are stand-ins here; the whole path on the real stack is in tests/e2e.
"""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig

from verl.workers.rollout import group_rollout
from verl.workers.rollout.group_rollout import GroupAgentLoopWorker
from verl.workers.rollout.trajectory_tree import ADAPTIVE_TEMPERATURE, OCCURRENCE
from verl.workers.rollout.tree_rollout import TreeRollout
from verl.workers.rollout.trees.over_generation import most_diverse

Worker = GroupAgentLoopWorker.__ray_metadata__.modified_class


class Rollout:
    validates = False

    def __init__(self):
        self.policy, self.asked = None, []

    async def run(self, prompt, n, sampling_params, plain):
        self.asked.append((prompt["uid"], n, sampling_params, plain))
        await asyncio.sleep(0)
        if prompt["uid"] == "raises":
            raise ValueError("no such token")
        if prompt["uid"] == "stuck":
            await asyncio.sleep(60)
        rows = {"too many": n + 1, "none": 0, "fewer": n - 1}.get(prompt["uid"], n)
        return [f"{prompt['uid']} {i}" for i in range(rows)]


@pytest.fixture
def queue(monkeypatch):
    """(uid, status) in the order in which they were published, and a worker whose sessions go to `put`."""
    published, put = [], []

    async def async_kv_put(key, partition_id, tag):
        assert partition_id in ("train", "val")
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
    worker.tree_rollout, released = Rollout(), []
    worker.engine = SimpleNamespace(release=released.append, released=released)
    worker.config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=DictConfig({"n": 3, "group_timeout": 0.5, "val_kwargs": {"n": 2}}))
    )
    worker._agent_loop_postprocess = postprocess
    return worker, published, put


def run(worker, uids, validate=False, **more):
    async def groups():
        prompts = [{"uid": uid, "agent_name": "x", **more} for uid in uids]
        await asyncio.gather(*(worker._run_prompt(prompt, {}, {"validate": validate}) for prompt in prompts))

    asyncio.run(groups())


def test_a_failing_group_fails_alone(queue):
    worker, published, put = queue
    uids = ["raises", "fine", "too many", "none", "stuck", "fewer"]
    run(worker, uids)
    assert dict(published) == dict.fromkeys(uids, "failure") | {"fine": "finished", "fewer": "finished"}
    assert sorted((uid, session) for uid, session, _, _ in put) == [
        *(("fewer", session) for session in range(2)),
        *(("fine", session) for session in range(3)),
    ]
    assert sorted(worker.engine.released) == sorted(uids), "every group gives its server back"


def test_a_groups_status_comes_after_its_last_session(queue):
    worker, published, put = queue
    run(worker, ["unscored"])
    assert published == [("unscored", "running"), ("unscored", "failure")]
    assert put == [], "half a group is none"


def test_validation_and_greedy_groups_do_not_branch(queue):
    worker, published, put = queue
    worker.tree_rollout.validates = True
    run(worker, ["sampled"])
    run(worker, ["greedy"], __do_sample__=False, __rollout_n__=1)
    run(worker, ["validated"], validate=True)
    groups = {uid: (n, params.get("temperature"), plain) for uid, n, params, plain in worker.tree_rollout.asked}
    assert groups == {"sampled": (3, None, False), "greedy": (1, 0.0, True), "validated": (2, None, True)}
    assert {status for _, status in published} == {"running", "finished"} and len(put) == 6


def test_validation_without_an_environment_is_upstreams(queue, monkeypatch):
    worker, published, _ = queue
    calls = []

    async def upstream(self, prompt, *args):
        calls.append(prompt["uid"])

    monkeypatch.setattr(group_rollout._AgentLoopWorker, "_run_prompt", upstream)
    run(worker, ["validated"], validate=True)
    worker.tree_rollout = None  # tree=null
    run(worker, ["trained"])
    assert calls == ["validated", "trained"] and not published


def test_the_samplers_settings_go_with_training_prompts_alone(queue):
    worker, *_ = queue
    worker.tree_rollout.validates = True
    run(worker, ["trained"], **{ADAPTIVE_TEMPERATURE: {"std": 1.0}})
    run(worker, ["validated"], validate=True, **{ADAPTIVE_TEMPERATURE: {"std": 1.0}})
    params = {uid: params for uid, _, params, _ in worker.tree_rollout.asked}
    assert params == {"trained": {"extra_args": {ADAPTIVE_TEMPERATURE: {"std": 1.0}}}, "validated": {}}


def test_seeds_differ_by_row_step_and_run_also_without_an_index():
    def seed(text="a", index=0, step=1, run=0, **more):
        config = DictConfig({"actor_rollout_ref": {"rollout": {"seed": run}}})
        prompt = {"raw_prompt": [{"role": "user", "content": text}], "index": index, "global_steps": step} | more
        return TreeRollout.seed_of(SimpleNamespace(config=config), prompt)

    # upstream gives index 0 to every row without one
    assert len({seed(), seed("b"), seed(index=1), seed(step=2), seed(run=1), seed(**{OCCURRENCE: 1})}) == 6
    assert seed() == seed() == seed(**{OCCURRENCE: 0})


def test_the_most_diverse_by_hand():
    responses = [[1, 2, 3, 4], [1, 2, 3, 5], [6, 7, 8, 9], [1, 2, 8, 9]]
    # first 0; farthest from it is 2 (4/4); then 3 (2/4 from both) before 1 (1/4 from 0)
    assert most_diverse(responses, 2) == [0, 2] and most_diverse(responses, 3) == [0, 2, 3]
    assert most_diverse(responses, 4) == [0, 1, 2, 3] and most_diverse([[1]] * 3, 2) == [0, 1]
